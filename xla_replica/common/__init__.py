"""What every package shares: argument checks, trees of tensors, whole files."""
