"""EnvPool's C++ environments inside ClusterEnv's workers: see `clusterenv.simulators.envpool`."""

from clusterenv.simulators.envpool import EnvPoolVectorEnv, envpool

__all__ = ["EnvPoolVectorEnv", "envpool"]
