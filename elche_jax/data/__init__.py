"""Reading the examples of a window and placing them on the devices."""
