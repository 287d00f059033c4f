"""The fidelities: what of a module's backward pass is balanced."""
