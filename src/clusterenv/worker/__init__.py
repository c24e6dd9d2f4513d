"""Code that runs inside a worker process."""
