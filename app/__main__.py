"""`python -m app` is the `mlxrunner` command."""

import sys

from app.cli import main

sys.exit(main())
