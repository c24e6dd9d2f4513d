"""A deterministic simulation of the head: the real driver, engine and workers over processes and nodes in memory.

One seed gives one schedule: what the user calls, what the workers do, which messages come when, and what fails. The
ledger beside it knows every transition that an environment produced, and checks what the user gets against that.
"""
