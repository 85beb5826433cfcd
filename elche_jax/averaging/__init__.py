"""Averaging in parameter space: devices take optimizer steps of their own, then join."""
