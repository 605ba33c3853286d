"""SIMD values: the verbs that kernels are written in, made of LLVM for one instruction set."""
