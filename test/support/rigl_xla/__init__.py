"""What several test modules of rigl_xla share."""
