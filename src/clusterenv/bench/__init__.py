"""Measure an environment, and recommend how many workers and environments to use: `clusterenv bench`.

`command.py` runs it. What it measures is in `bare.py` and `measure.py`; what it decides in `model.py`, `advise.py` and
`notes.py`, which are pure.
"""

from clusterenv.bench.command import main

__all__ = ["main"]
