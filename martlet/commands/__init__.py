"""One module a command of the command line; each has `add_arguments(parser)` and `execute(args)` (read `run.py` next)."""
