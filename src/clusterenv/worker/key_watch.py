"""Notice keys that the environments' infos never have, so that a misspelt `action_mask` or `info_keys` is not silent.

A worker passes the infos that it sees to a `KeyWatch`. When an episode has ended without one of the keys, the watch
returns a `MissingKeys`, once, which is sent with the fragment's answer; the head turns it into a warning. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clusterenv.arguments import closest
from clusterenv.wire.requests import MissingKeys

__all__ = ["KeyWatch", "explain"]

_MOST_KEYS = 20
_LONGEST_KEY = 60


class KeyWatch:
    """Keep track of the keys not seen yet, and of those seen instead.

    Args:
        mask: key of the action masks, if they are looked for in infos.
        info_keys: keys whose values the collector returns.
    """

    def __init__(self, mask: str | None, info_keys: Iterable[str]) -> None:
        self._mask = mask
        self._keys = set(info_keys)
        self._seen: set[str] = set()

    def __bool__(self) -> bool:
        """Return whether any key is still looked for."""
        return self._mask is not None or bool(self._keys)

    def stepped(self, info: Mapping[str, Any]) -> None:
        """Note the info of a step."""
        self._seen.update(info)
        self._keys.difference_update(info)
        if self._mask in info:
            self._mask = None

    def was_reset(self, info: Mapping[str, Any]) -> None:
        """Note the info of a reset: it may hold a mask, but the collector returns no values of it."""
        if self._mask is not None:
            self._seen.update(info)
            if self._mask in info:
                self._mask = None

    def episode_ended(self) -> MissingKeys | None:
        """Return the keys that an episode has ended without, if any; nothing is looked for after that."""
        if not self:
            return None
        seen = sorted(str(key)[:_LONGEST_KEY] for key in self._seen)
        missing = MissingKeys(self._mask, sorted(self._keys), seen[:_MOST_KEYS])
        self._mask, self._keys, self._seen = None, set(), set()
        return missing


def explain(missing: MissingKeys) -> list[str]:
    """Return the warnings for the user.

    They are not errors, because an environment may have a mask or an info in some episodes only.
    """
    texts = []
    if missing.mask is not None:
        text = f"action_mask={missing.mask!r}: neither the observation nor any info had this by the end of an episode"
        texts.append(f"{text}, so every action was allowed. {_seen([missing.mask], missing.seen)}")
    if missing.info_keys:
        text = f"info_keys={missing.info_keys!r}: no info had {'these' if missing.info_keys[1:] else 'this'}"
        texts.append(f"{text} by the end of an episode. {_seen(missing.info_keys, missing.seen)}")
    return texts


def _seen(keys: list[str], seen: list[str]) -> str:
    near = " or ".join(repr(word) for key in keys if (word := closest(key, seen)) is not None)
    hint = f" (did you mean {near}?)" if near else ""
    return f"Keys of the infos: {', '.join(map(repr, seen)) or 'none'}{hint}. Ignore this if other episodes have it"
