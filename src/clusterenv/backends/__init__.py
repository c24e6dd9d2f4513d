"""Where the environments run. A backend is data; it turns a plan into a running member."""

from clusterenv.backends.local import Local

__all__ = ["Local"]
