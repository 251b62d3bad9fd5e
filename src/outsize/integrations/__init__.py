"""Other libraries' training loops on a prepared model. They stand on the room `api`; the cache of `generate()` on `move`."""
