"""For tests and experiments: `Virtual`, a cluster without machines; `backends`, the tests that every backend passes."""

from clusterenv.testing.virtual import Virtual

__all__ = ["Virtual"]
