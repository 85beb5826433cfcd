"""The mapped programs of a window, and the machinery that runs and times them."""
