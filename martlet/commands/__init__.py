"""The commands of the command line; `martlet/cli.py` lists them (read `run.py` next)."""
