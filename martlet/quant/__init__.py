"""Block-quantised weights: the table of types, their layouts, decoding and encoding."""
