"""Stage 1 alone: tokenizer, item IDs and backbone from the public pools. Takes the options of scripts/federate.py."""

import sys

from fedecider.cli.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
