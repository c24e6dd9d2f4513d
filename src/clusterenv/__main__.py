"""Run the command line with `python -m clusterenv`."""

import sys

from clusterenv.cli import main

sys.exit(main())
