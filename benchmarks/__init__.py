"""Compare the steps per second of this project and its peers in one run: `python -m benchmarks`."""
