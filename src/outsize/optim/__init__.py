"""The update: which arrays each optimizer keeps, and one pass over them, chunk by chunk. `Lion` is for users."""

from outsize.optim.native import Lion as Lion
