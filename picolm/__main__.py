"""`python -m picolm`: the command line. Matrix products have threads of their own, so BLAS is told to use one."""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from picolm.cli import main

sys.exit(main())
