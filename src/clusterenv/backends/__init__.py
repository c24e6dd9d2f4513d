"""Where environments run."""

from clusterenv.backends.kubernetes import Kubernetes
from clusterenv.backends.local import Local
from clusterenv.backends.manual import Manual
from clusterenv.backends.ray import Ray
from clusterenv.backends.slurm import Slurm

__all__ = ["Kubernetes", "Local", "Manual", "Ray", "Slurm"]
