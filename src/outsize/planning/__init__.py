"""What goes where, and when it is needed: arithmetic only, no torch."""
