"""Processes of a job on this machine: started, watched and ended, without JAX."""
