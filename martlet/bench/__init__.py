"""Benchmarks of the engine and of servers; `martlet bench` runs them."""
