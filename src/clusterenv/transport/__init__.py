"""Frames over TCP with keys; knows no meanings."""
