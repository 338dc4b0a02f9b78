"""A finished run as an HTTP service with a page: python scripts/serve.py --run runs/x --port 8000."""

import sys

from fedecider.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
