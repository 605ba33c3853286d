"""`python -m picolm`, and the `picolm` command. Matrix products have threads of their own, so BLAS is told to use one."""

import os
import signal
import sys


def run() -> None:
    """The command line; NumPy is not loaded before BLAS has been told."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Ctrl-C and a closed pipe end the program without a word, as they end the C; here Python's own answers would be tracebacks.
    for name, pythons in (("SIGINT", signal.default_int_handler), ("SIGPIPE", signal.SIG_IGN)):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is pythons:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    from picolm.cli import main

    sys.exit(main())


if __name__ == "__main__":
    run()
