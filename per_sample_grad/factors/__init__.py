"""What gradients are products of, and the answers that follow from that."""
