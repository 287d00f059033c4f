"""Sums with the same bits on any number of replicas; members that come and go."""
