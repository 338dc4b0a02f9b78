"""The same run between machines: python scripts/deploy.py --help lists the commands."""

import sys

from fedecider.cli.deploy import main

if __name__ == "__main__":
    sys.exit(main())
