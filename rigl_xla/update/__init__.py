"""The steps of a pruner: collecting gradients, and one update of all layers."""
