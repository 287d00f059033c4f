"""An epoch of GraB: its order, the progress in it, and the balance state."""
