"""Simulate the head deterministically: the real driver, engine and workers over in-memory processes and nodes.

One seed gives one schedule: the user's calls, the workers' actions, the order of messages, and the faults. A ledger
knows every transition that an environment produced, and checks the user's results against it.
"""
