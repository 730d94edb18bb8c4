"""``python -m crosscurrent`` is ``crosscurrent``."""

import sys

from crosscurrent.cli import main

sys.exit(main())
