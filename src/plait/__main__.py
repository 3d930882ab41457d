"""`python -m plait`: the same as the `plait` command."""

import sys

from plait.cli.main import main

sys.exit(main())
