"""`python -m picolm`, and the `picolm` command. Matrix products have threads of their own, so BLAS is told to use one."""

import os
import sys


def run() -> None:
    """The command line; NumPy is not loaded before BLAS has been told."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from picolm.cli import main

    sys.exit(main())


if __name__ == "__main__":
    run()
