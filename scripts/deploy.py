"""The same run between machines: python scripts/deploy.py provision | simulate | start | submit | status | collect."""

import sys

from fedecider.commands.deploy import main

if __name__ == "__main__":
    sys.exit(main())
