"""What the operating system allows and reports."""
