"""One place for the number."""

__version__ = "0.1.0"
