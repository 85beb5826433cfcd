"""Exchange on the host: devices deliver their updates and never wait in a collective."""
