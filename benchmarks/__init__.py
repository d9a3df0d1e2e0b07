"""Benchmarks of fedsim and of other libraries, each in its own environment. See README.md."""
