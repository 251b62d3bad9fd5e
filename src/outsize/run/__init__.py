"""WHEN: units and their residency, the order in which they are used, and the hooks that notice it."""
