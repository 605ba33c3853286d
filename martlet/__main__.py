"""`python -m martlet` is the `martlet` command."""

from __future__ import annotations

import sys

from martlet.cli import main

__all__: list[str] = []

sys.exit(main())
