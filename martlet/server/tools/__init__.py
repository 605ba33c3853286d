"""Separates tool calls and reasoning from a model's streamed text (read `reply.py` next)."""
