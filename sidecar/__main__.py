"""`python -m sidecar` is `dflash-sidecar`."""

import sys

from sidecar.app import main

sys.exit(main())
