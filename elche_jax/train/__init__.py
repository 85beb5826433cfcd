"""The training step the user calls, and the windows it is called with."""
