"""`python -m outsize` is the command `outsize`."""

import sys

from outsize.cli import main

if __name__ == "__main__":
    sys.exit(main())
