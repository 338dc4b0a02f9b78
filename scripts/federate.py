"""Federated, personalised recommenders for several domains: accelerate launch scripts/federate.py --domains a,b,c."""

import sys

from fedecider.cli.federate import main

if __name__ == "__main__":
    sys.exit(main())
