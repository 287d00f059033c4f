"""The log of a run, and the page that compares runs."""
