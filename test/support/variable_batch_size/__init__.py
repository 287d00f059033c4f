"""What several test modules of variable_batch_size share."""
