"""What the server or another client can infer from what it sees: python scripts/audit.py --run runs/x."""

import sys

from fedecider.cli.audit import main

if __name__ == "__main__":
    sys.exit(main())
