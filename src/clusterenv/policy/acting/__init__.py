"""How policies choose actions on workers."""
