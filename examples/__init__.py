"""Training scripts, one folder per subject; ``--help`` explains each."""
