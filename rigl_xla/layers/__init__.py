"""Which weights can be sparse, and a weight with its mask and history."""
