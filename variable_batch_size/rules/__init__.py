"""From the batch ratio to the hyperparameters of one update."""
