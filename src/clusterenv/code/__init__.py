"""Name, find, pack and send the user's code."""
