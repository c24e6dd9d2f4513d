"""Steps per second of this project beside its peers, in one run: `python -m benchmarks`."""
