"""What a vector environment is given and gives back: calls and arguments checked, actions read, results shaped."""
