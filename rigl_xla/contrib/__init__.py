"""Names and files of rigl-torch, and compact files."""
