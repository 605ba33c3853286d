"""The kernels, and the fields and layouts that they read: all that object code is compiled from, with `simd`."""
