"""Checkpoints of rigl-torch."""
