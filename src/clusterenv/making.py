"""`make_vec`: make a `ClusterEnv` from an id and keyword arguments, both ours and the environment's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec

from clusterenv.arguments import closest, expect, shown
from clusterenv.env import ClusterEnv
from clusterenv.errors import SpecError
from clusterenv.spec import constructor_takes

_OWN = ("backend", "autoreset_mode", "recovery", "copy", "observation_mode", "resume", "simulator", "env_kwargs")
_GYMNASIUMS = {
    "vectorization_mode": "leave it out: environments run in worker processes, backend=... says where.",
    "vector_kwargs": "write its entries as arguments of make_vec.",
    "wrappers": "write ClusterEnv(lambda: Wrapper(gym.make(id)), num_envs).",
}
"""Arguments of `gymnasium.make_vec` that this one does not have, and what to write instead."""


def make_vec(id: str | EnvSpec, num_envs: int = 1, **kwargs: Any) -> ClusterEnv:
    """Make a `ClusterEnv`, and pass arguments that it does not have to the environment.

    A name that is nearly one of ours is refused, unless the environment's constructor has it; pass arguments for a
    constructor that takes `**kwargs` in `env_kwargs`.

    Example:
        >>> import clusterenv as ce
        >>> envs = ce.make_vec("CartPole-v1", num_envs=2, render_mode="rgb_array")
        >>> envs.render_mode
        'rgb_array'
        >>> envs.close()
    """
    own = {key: kwargs.pop(key) for key in _OWN if key in kwargs}
    for name in kwargs:
        near = closest(name, ("num_envs", *_OWN))
        hint = f"did you mean {near}=...?" if near else _GYMNASIUMS.get(name)
        if hint and not constructor_takes(id, name):
            text = f"make_vec({name}={shown(kwargs[name])}): make_vec has no argument of this name; {hint}"
            raise SpecError(f"{text} If the environment is to get it, write env_kwargs={{{name!r}: ...}}")
    given = own.pop("env_kwargs", None)
    expect("make_vec", "env_kwargs", given, Mapping[str, Any] | None)
    return ClusterEnv(id, num_envs, env_kwargs={**(given or {}), **kwargs}, **own)
