"""`python -m weft COMMAND`: the command line, which weft_cli.py has."""

import sys

from weft_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
