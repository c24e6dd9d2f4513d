"""Check the calls and arguments of `ClusterEnv`, read actions, and shape results as Gymnasium does."""
