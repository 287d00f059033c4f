"""Masks, structures, methods, update schedules and sparsities of layers."""
