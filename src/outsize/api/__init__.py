"""The only room that composes the others: what a user calls."""
