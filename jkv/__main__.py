"""Runs the command line as `python -m jkv`."""

import sys

from jkv.cli import main

sys.exit(main())
