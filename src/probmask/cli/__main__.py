"""Run the command line as ``python -m probmask.cli``."""

import sys

from probmask.cli import main

if __name__ == "__main__":
    sys.exit(main())
