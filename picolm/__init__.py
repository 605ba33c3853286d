"""picoLM in NumPy: a small engine that runs a GGUF file, module for module after the C program of that name.

It shares nothing with `martlet` and checks it from outside. Reading order: `cli` (the loop), `model` (the forward pass), `tensor`
(its arithmetic), `quant` and `kquants` (blocks), `gguf` and `config` (the file), `kvcache`, `tokenizer` and `bpe`, `sampler`,
`grammar`, `libm`. What differs from the C, and why: each file's head, and docs/picolm.md. The original: picoLM by RightNow AI,
MIT licence, github.com/RightNow-AI/picolm at cf3f2df.
"""
