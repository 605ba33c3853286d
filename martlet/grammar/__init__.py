"""Constrained decoding: schemas, patterns and grammars to masks over tokens (see README.md)."""
