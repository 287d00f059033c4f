"""Other people's names, files and conventions; 2:4 kernels; compact files."""
