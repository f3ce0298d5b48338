"""Measurements. Each is run by itself; benchmarks/papers is a package: python -m benchmarks.papers."""
