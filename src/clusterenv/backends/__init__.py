"""Where environments run."""

from clusterenv.backends.kubernetes import Kubernetes
from clusterenv.backends.local import Local
from clusterenv.backends.loopback import Loopback
from clusterenv.backends.manual import Manual
from clusterenv.backends.ray import Ray
from clusterenv.backends.slurm import Slurm

__all__ = ["Kubernetes", "Local", "Loopback", "Manual", "Ray", "Slurm"]
