"""HOW bytes travel: transfers, stores on each tier, staging, and the conveyor that keeps them all busy."""
