"""Checkpoints of a run: atomic, verified by checksums, and restored on any devices."""
