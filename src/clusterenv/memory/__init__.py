"""Layouts of the memory that head and workers share."""
