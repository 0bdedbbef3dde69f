"""`python -m looped_lm COMMAND`."""

import sys

from looped_lm.cli import cli

if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
