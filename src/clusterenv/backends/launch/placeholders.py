"""Make commands and the text of scripts: split words, check variables, fill `{placeholders}`. Pure.

Only the names that a caller knows are placeholders, because shell text has braces of its own: `${name}`, `{a,b}` and
`awk '{print $1}'` stay as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from clusterenv.arguments import closest
from clusterenv.errors import SpecError

_BRACED = re.compile(r"(?<!\$)\{([A-Za-z_]+)\}")  # `${name}` is the shell's


def split_words(who: str, name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return a command as words; a string is split as a shell would. Raises SpecError, naming the option."""
    try:
        words = tuple(shlex.split(value) if isinstance(value, str) else value)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{who}({name}={value!r}): expected a string or a list of words ({error})") from None
    if not all(isinstance(word, str) for word in words):
        raise SpecError(f"{who}({name}={value!r}): expected a string or a list of words")
    return words


def check_variables(who: str, variables: Mapping[str, str | int | float]) -> None:
    """Raise SpecError for a name that `export` would take for something else: the shell would run it."""
    for name in variables:
        if not isinstance(name, str) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise SpecError(
                f"{who}(env_vars=...): {name!r} is no name of a variable: expected letters, digits and _, with no "
                "digit first"
            )


def check_placeholders(who: str, name: str, text: str, known: Iterable[str]) -> set[str]:
    """Return the placeholders in `text`. Raises SpecError for one that looks like a misspelling of a known one."""
    known, found = tuple(known), set(_BRACED.findall(text))
    for word in sorted(found.difference(known)):
        near = closest(word, known)
        if near is not None:
            raise SpecError(f"{who}({name}=...) has {{{word}}}, which is no placeholder; did you mean {{{near}}}?")
    return found.intersection(known)


def has_placeholder(words: Sequence[str], name: str) -> bool:
    return any(name in _BRACED.findall(word) for word in words)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with the placeholders of these names replaced; all other braces stay."""
    return _BRACED.sub(lambda match: values.get(match[1], match[0]), text)


def fill_words(words: Sequence[str], values: Mapping[str, str], lists: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words with placeholders replaced.

    A word that is only the placeholder of a list becomes one word for each item; within a longer word, the items are
    joined by spaces.
    """
    joined = {name: " ".join(items) for name, items in lists.items()}
    filled: list[str] = []
    for word in words:
        match = _BRACED.fullmatch(word)
        filled += lists[match[1]] if match and match[1] in lists else [fill(word, {**values, **joined})]
    return filled
