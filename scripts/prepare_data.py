"""Raw files of a public data set -> prepared domains; python scripts/prepare_data.py --help."""

import sys

from fedecider.cli.prepare import main

if __name__ == "__main__":
    sys.exit(main())
