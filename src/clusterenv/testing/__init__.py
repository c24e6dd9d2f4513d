"""For tests and experiments: `Virtual`, a cluster without machines; `backends`, the tests that every backend passes;
`chaos`, faults for real runs and a ledger of their transitions."""

from clusterenv.testing.virtual import Virtual

__all__ = ["Virtual"]
