"""Environments on one machine: `Pool` starts, watches and restarts the workers that step them."""

from clusterenv.pool.pool import Pool

__all__ = ["Pool"]
