"""Scripts for developers of this project."""
