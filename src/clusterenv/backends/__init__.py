"""Where environments run."""

from clusterenv.backends.local import Local
from clusterenv.backends.manual import Manual

__all__ = ["Local", "Manual"]
