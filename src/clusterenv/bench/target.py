"""Find what the user named on the command line: an environment id, or a function that makes an environment."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from clusterenv.arguments import closest
from clusterenv.errors import SpecError
from clusterenv.spec import MakeFromSpec, find_spec

__all__ = ["Target", "find_target"]


@dataclass(frozen=True)
class Target:
    text: str
    """As the user wrote it."""
    env: Any
    """The first argument of `ClusterEnv`."""
    make: Callable[[], Any]
    """Makes one environment."""
    is_id: bool

    def code(self, arguments: str) -> tuple[str, ...]:
        """Return the lines that make a `ClusterEnv` of this environment."""
        if self.is_id:
            return (f'envs = ce.ClusterEnv("{self.text}", {arguments})',)
        module, _, name = self.text.partition(":")
        first, dot, _ = name.partition(".")  # of "module:Class.method"
        name = name if dot else first
        return (f"from {module} import {first}", f"envs = ce.ClusterEnv({name}, {arguments})")


def find_target(text: str) -> Target:
    """Return the target of this text; raise SpecError if there is none.

    "module:name" is a function or a class if the module has that name, otherwise an id that the module registers.
    """
    here = str(Path.cwd())
    if here not in sys.path:  # as with `python -m`; the script of an installed command has only its own folder there
        sys.path.insert(0, here)
    module_name, colon, name = text.partition(":")
    if not colon:
        spec = _spec_or_hint(text)
        return Target(text, text, MakeFromSpec(spec, {}), is_id=True)
    if not module_name or not name:
        raise SpecError(f"{text!r}: expected an id such as CartPole-v1, or module:function such as my_pkg:make_env")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's code, which may raise anything
        what = f"{type(error).__name__}: {error}"
        raise SpecError(f"{text!r}: the module {module_name} cannot be imported: {what}") from error
    module = found
    for part in name.split("."):
        if not hasattr(found, part):
            if name in gym.registry or _is_registered(text):
                return Target(text, text, MakeFromSpec(find_spec(text), {}), is_id=True)
            near = closest(name, [known for known in vars(module) if not known.startswith("_")])
            hint = f"did you mean {module_name}:{near}?" if near else "write the name of a function that it defines"
            raise SpecError(f"{text!r}: the module {module_name} has no {name!r}, and registers no such id; {hint}")
        found = getattr(found, part)
    if not callable(found):
        what = f"is {type(found).__name__}"
        raise SpecError(f"{text!r} {what}, which cannot be called; name a function that makes an environment")
    return Target(text, found, found, is_id=False)


def _is_registered(text: str) -> bool:
    try:
        find_spec(text)
    except SpecError:
        return False
    return True


def _spec_or_hint(text: str) -> Any:
    try:
        return find_spec(text)
    except SpecError as error:
        hint = "for an environment of your own, write module:function, such as my_pkg:make_env"
        raise SpecError(f"{error}; {hint}") from error
