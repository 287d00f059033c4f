"""Checkpoints of rigl-torch, and compact files."""
