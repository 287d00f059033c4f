"""Reading and checking a trace."""
