"""Tool calls and reasoning in a model's text, found as it comes (read `reply.py` next)."""
