"""Environments written in JAX inside ClusterEnv's workers: see `clusterenv.simulators.jax_envs`."""

from clusterenv.simulators.jax_envs import JaxVectorEnv, PureEnv, brax, gymnax, jax_env

__all__ = ["JaxVectorEnv", "PureEnv", "brax", "gymnax", "jax_env"]
