"""What travels between machines."""
