"""How weights are encoded."""
