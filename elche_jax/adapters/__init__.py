"""Flax on top of the training step: models without loss plumbing, and Flax's own train state."""
