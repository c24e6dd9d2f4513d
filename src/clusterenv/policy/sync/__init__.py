"""When weights travel."""
