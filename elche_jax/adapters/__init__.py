"""Flax models as loss functions, and conversion to and from Flax's train state."""
