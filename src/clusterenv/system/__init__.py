"""Query and use the operating system: CPU and file limits, signals, processes."""
