"""Block-quantised weights: the table of types, their decoding to float32, encoding, and the kernels' layouts."""
