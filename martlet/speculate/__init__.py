"""Speculative decoding: drafters, and the judge of when drafting pays (read `judge.py` next)."""
