"""The head's side of the network."""
