"""A whole table of federated runs: python scripts/compare.py --config configs/compare/amazon_cpu.yaml."""

import sys

from fedecider.cli.compare import main

if __name__ == "__main__":
    sys.exit(main())
