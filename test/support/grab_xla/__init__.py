"""What several test modules of grab_xla share."""
