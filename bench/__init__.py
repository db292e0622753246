"""Benchmarks: each measures its own ceiling in the same run."""
