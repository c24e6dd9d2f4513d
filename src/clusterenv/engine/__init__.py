"""Decisions of the head: slots, workers, requests, fragments and weights."""
