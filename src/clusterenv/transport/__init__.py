"""Frames over TCP with keys; does not interpret them."""
