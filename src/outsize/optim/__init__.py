"""The update: which arrays each optimizer keeps, and one pass over them, chunk by chunk."""
