"""Parts that all backends over a network share: addresses, the run's folder and note, the supervisor of its jobs."""
