"""Make texts of environments and nodes safe to print: they may have escape sequences, which terminals obey."""

from __future__ import annotations

__all__ = ["clean", "clean_lines"]


def clean(text: str) -> str:
    """Return the text as one line without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


def clean_lines(text: str) -> str:
    """Return the text without control characters other than line breaks."""
    return "\n".join(clean(line.expandtabs()) for line in text.splitlines())
