"""`python -m plait`: the same as the `plait` command."""

import sys

from plait.app.cli.main import main

sys.exit(main())
