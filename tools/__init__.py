"""Benchmarks, studies and the references that they compare with."""
