"""What chooses actions."""
