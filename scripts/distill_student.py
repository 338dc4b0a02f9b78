"""Stage 2 alone: the student of half depth. Takes the options of scripts/federate.py."""

import sys

from fedecider.cli.distill import main

if __name__ == "__main__":
    sys.exit(main())
