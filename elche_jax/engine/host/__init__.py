"""Exchange on the host: devices deliver what they did, nobody waits in a collective."""
