"""`make_vec`: make a `ClusterEnv` from an id and keyword arguments, both ours and the environment's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium.envs.registration import EnvSpec

from clusterenv.arguments import closest, expect, shown
from clusterenv.env import ClusterEnv
from clusterenv.errors import SpecError
from clusterenv.spec import MakeFromSpec, constructor_takes, find_spec

_OWN = ("backend", "autoreset_mode", "recovery", "copy", "observation_mode", "resume", "simulator", "name", "dashboard")
_NAMES = ("num_envs", "wrappers", "env_kwargs", *_OWN)
_GYMNASIUMS = {
    "vectorization_mode": "leave it out: environments run in worker processes, backend=... says where.",
    "vector_kwargs": "write its entries as arguments of make_vec.",
}
"""Arguments of `gymnasium.make_vec` that this one does not have, and what to write instead."""


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    *,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> ClusterEnv:
    """Make a `ClusterEnv`, and pass arguments that it does not have to the environment.

    A name that is nearly one of ours is refused, unless the environment's constructor has it; pass arguments for a
    constructor that takes `**kwargs` in `env_kwargs`.

    Args:
        wrappers: functions that wrap each environment, the first one innermost, as in `gymnasium.make_vec`. They run in
            the workers: classes such as `gymnasium.wrappers.RecordEpisodeStatistics`, or `lambda env: ...`.
        env_kwargs: arguments for the environment, whatever their names.

    Example:
        >>> import clusterenv as ce
        >>> envs = ce.make_vec("CartPole-v1", num_envs=2, render_mode="rgb_array")
        >>> envs.render_mode
        'rgb_array'
        >>> envs.close()
    """
    own = {key: kwargs.pop(key) for key in _OWN if key in kwargs}
    for name in kwargs:
        near = closest(name, _NAMES)
        hint = f"did you mean {near}=...?" if near else _GYMNASIUMS.get(name)
        if hint and not constructor_takes(id, name):
            text = f"make_vec({name}={shown(kwargs[name])}): make_vec has no argument of this name; {hint}"
            raise SpecError(f"{text} If the environment is to get it, write env_kwargs={{{name!r}: ...}}")
    expect("make_vec", "env_kwargs", env_kwargs, Mapping[str, Any] | None)
    expect("make_vec", "wrappers", wrappers, Sequence[Callable[..., Any]] | None, hint="write wrappers=[...]")
    env_kwargs = {**(env_kwargs or {}), **kwargs}
    if not wrappers:
        return ClusterEnv(id, num_envs, env_kwargs=env_kwargs, **own)
    if own.get("simulator") is not None:
        raise SpecError(f"make_vec(wrappers=...) wraps single environments: leave out simulator={own['simulator']!r}")
    return ClusterEnv(MakeFromSpec(find_spec(id), env_kwargs, tuple(wrappers)), num_envs, **own)
