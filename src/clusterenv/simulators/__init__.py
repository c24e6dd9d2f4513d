"""Simulators that step many environments at once, as `Vector`s for `ClusterEnv`."""
