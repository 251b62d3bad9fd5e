"""Checkpoints: a folder of raw arrays under a manifest, published at once; see `docs/checkpoint-format.md`."""
