"""Run the command line as ``python -m probmask.cli``."""

import sys

from probmask.cli import main

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python puts the working directory first, and PyTorch would execute a dill.py there.
        sys.path.pop(0)
    sys.exit(main())
