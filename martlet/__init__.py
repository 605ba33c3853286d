"""Martlet: a complete LLM inference engine in Python. Read `types.py` first, then `engine/engine.py`."""
