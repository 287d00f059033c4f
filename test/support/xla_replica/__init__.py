"""What test modules of all packages know of replicas: backends, scripts, signals."""
