"""Evaluate the adapters of a finished run again, as plain peft loads them: python scripts/evaluate.py --run runs/x."""

import sys

from fedecider.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
