"""`launch`, and how replicas are started and ended."""
