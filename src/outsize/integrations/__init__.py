"""Other libraries' training loops on a prepared model. Each module stands on the public API alone."""
