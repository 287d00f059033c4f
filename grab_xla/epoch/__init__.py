"""An epoch of GraB: its state, passes over the sampler, rows of gradients."""
