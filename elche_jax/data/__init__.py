"""Which examples a window holds, and getting them to the devices."""
