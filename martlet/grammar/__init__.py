"""Constrained decoding: from a schema, a pattern or a grammar to masks over tokens (read
`states.py` first).
"""
