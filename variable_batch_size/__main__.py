"""Runs the command ``vbs``."""

import sys

from variable_batch_size.command_line import main

if __name__ == "__main__":
    sys.exit(main())
