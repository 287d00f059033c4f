"""Members: processes that join a run, leave it or die while it goes on."""
