"""Commands that print the figures in `RESULTS.md`."""
