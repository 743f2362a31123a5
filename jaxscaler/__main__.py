"""`python -m jaxscaler`."""

import sys

from jaxscaler.cli import main

if __name__ == "__main__":
    sys.exit(main())
