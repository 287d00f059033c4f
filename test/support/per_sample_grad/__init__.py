"""What several test modules of per_sample_grad share."""
