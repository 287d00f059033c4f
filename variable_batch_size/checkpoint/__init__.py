"""`Checkpointer`: what is saved, how files are written, when a run stops."""
