"""Orders from the neural tangent kernel."""
