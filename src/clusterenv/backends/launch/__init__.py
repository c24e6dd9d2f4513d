"""What every backend over a network shares: addresses, the folder of a run and its note, the supervisor of its jobs."""
