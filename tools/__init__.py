"""Scripts for those who work on the code itself."""
