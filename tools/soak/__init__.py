"""A long run under random faults whose ledger has to be exact: `python -m tools.soak --minutes 60 --seed 1`."""
