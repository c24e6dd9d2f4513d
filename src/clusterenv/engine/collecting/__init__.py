"""Decisions about collecting with a policy on the workers: fragments, weights, what a batch consists of."""
