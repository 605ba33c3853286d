"""Sampling: a row of logits to a token (read `sampler.py` first)."""
