"""The page of a finished run, made again: python scripts/report.py --run runs/x."""

import sys

from fedecider.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
