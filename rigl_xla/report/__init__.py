"""Sizes, operations and costs of a sparse model, and reports of a run."""
