"""picoLM in NumPy: a small engine that runs a GGUF file, module for module after the C program of that name.

It shares nothing with `martlet` and checks it from outside. Reading order: `cli` (the loop), `model` (the forward pass), `tensor`
(its arithmetic), `quant`, `kquants` (blocks), `gguf`, `config` (the file), `tokenizer`, `sampler`, `grammar`, `kvcache`, `libm`. What
differs from the C: each file's head, and docs/picolm.md. Original: picoLM, MIT licence, github.com/RightNow-AI/picolm at cf3f2df.
"""
