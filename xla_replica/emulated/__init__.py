"""N replicas on XLA:CPU, in threads of one process."""
