"""Constrained decoding: from a schema, a pattern or a grammar to masks over tokens (read `types.py` first)."""
