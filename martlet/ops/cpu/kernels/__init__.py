"""The kernels, and the fields and layouts that they read.

All that object code is compiled from, with `simd`.
"""
