"""Every method, baseline and protocol on one data set: python scripts/leaderboard.py --dataset ml-100k."""

import sys

from fedecider.cli.leaderboard import main

if __name__ == "__main__":
    sys.exit(main())
