"""Kinds of devices: traits, seeding, prefetching, precision, selection."""
