"""The update: which arrays each optimizer keeps, and one pass over them, chunk by chunk. `Lion`, `LazyAdamW` and
`RowwiseAdagrad` are for users."""

from outsize.optim.native import Lion as Lion
from outsize.optim.rows import LazyAdamW as LazyAdamW
from outsize.optim.rows import RowwiseAdagrad as RowwiseAdagrad
