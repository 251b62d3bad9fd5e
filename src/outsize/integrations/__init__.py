"""Other libraries' training loops on a prepared model. They stand on `api`, the cache of `generate()` on `move`."""
