"""A long run under random faults whose ledger must be exact: `python -m tools.soak --minutes 60 --seed 1`."""
