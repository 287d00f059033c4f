"""Scores and projections of all samples of a pool, in parts that survive."""
