"""The reason why a policy stays in torch."""

from __future__ import annotations

__all__ = ["NotExportable"]


class NotExportable(Exception):
    """The policy cannot run without torch; the text says why."""
