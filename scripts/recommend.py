"""Next items for a history of titles: python scripts/recommend.py --run runs/x --domain crime --history "A | B"."""

import sys

from fedecider.cli.recommend import main

if __name__ == "__main__":
    sys.exit(main())
