"""Tools for tests and experiments: `Virtual`, a simulated cluster; `backends`, the tests that every backend must pass;
`chaos`, faults for real runs and a ledger of their transitions."""

from clusterenv.testing.virtual import Virtual

__all__ = ["Virtual"]
