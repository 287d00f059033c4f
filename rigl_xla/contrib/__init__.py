"""Other people's names, files and conventions; compact files."""
