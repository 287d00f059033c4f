"""Orders from kernels: the neural tangent kernel, and orders made offline."""
