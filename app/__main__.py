"""Runs the `mlxrunner` command as `python -m app`.

Knows: the command line's entry point. Must not know: commands.
"""

import sys

from app.cli import main

sys.exit(main())
