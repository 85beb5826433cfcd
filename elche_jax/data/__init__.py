"""Reading the examples of a window."""
