"""A whole table of federated runs: python scripts/compare.py --config benchmarks/configs/compare/amazon_t5.yaml."""

import sys

from fedecider.cli.compare import main

if __name__ == "__main__":
    sys.exit(main())
