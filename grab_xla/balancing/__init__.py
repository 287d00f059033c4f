"""Pure functions of balancing: inner products, signs, the next order, herding."""
