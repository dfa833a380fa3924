"""`python -m deepufm.cli`, where no script is installed."""

import sys

from ._main import main

sys.exit(main())
