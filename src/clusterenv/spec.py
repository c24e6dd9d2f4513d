"""Describe the environments to build (an id with kwargs, thunks, a vector factory) as bytes that a worker can unpack.

`blueprint` makes a `Blueprint` from the first argument of `ClusterEnv`; workers read it with `load_makers`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, load_env_creator, parse_env_id
from gymnasium.vector import VectorEnv

from clusterenv.arguments import expect, refused
from clusterenv.code import packages as sources
from clusterenv.code import registry
from clusterenv.code.missing import dumps, dumps_with_words, why
from clusterenv.errors import SpecError


@dataclass(frozen=True)
class Vector:
    """A factory `fn(num_envs, seeds)` of a VectorEnv that one worker runs as a whole (EnvPool and others).

    `seeds` holds one int per environment, different for every slot of the run.
    """

    fn: Callable[[int, list[int]], VectorEnv[Any, Any, Any]]

    def __post_init__(self) -> None:
        expect("Vector", "fn", self.fn, Callable, hint="write Vector(lambda num_envs, seeds: ...)")


class Delivered(NamedTuple):
    """The user's own packages on a node, except those that Python finds there by itself."""

    folders: dict[str, str]
    archive: bytes  # the packages that the head had to send


ObservationMode = Literal["same", "different"] | tuple[Space[Any], Space[Any]]
"""One observation space for all slots, or different spaces of one shape and dtype; or the pair (batched, single)."""


@dataclass(frozen=True)
class Blueprint:
    """How to build every slot's environment, ready to send."""

    num_envs: int
    payload: bytes  # a pickled `_Payload`; or JSON (`is_named`)
    is_vector: bool
    spec: EnvSpec | None
    is_named: bool = False  # the payload is an id and keyword arguments, for nodes that take no code
    packages: tuple[sources.Package, ...] = ()
    """The user's own packages that the payload names, for nodes that may not have them."""
    delivered: Delivered | None = None  # on a node: where to find those packages that it does not have installed
    observation_mode: ObservationMode = "same"


class _Payload(NamedTuple):
    makers: bytes  # cloudpickle of one maker for all slots, a list with one each, or a `Vector`
    registered: registry.Registered


@dataclass(frozen=True)
class MakeFromSpec:
    """Makes a registered environment, and wraps it as `gymnasium.make_vec(wrappers=...)` does."""

    spec: EnvSpec
    kwargs: Mapping[str, Any]
    wrappers: tuple[Callable[[Any], Any], ...] = ()

    def __call__(self, **changed: Any) -> Any:
        # Gymnasium's passive checker would be one more wrapper in every step; the worker has its own checks.
        env = gym.make(self.spec, **{"disable_env_checker": True, **self.kwargs, **changed})
        for wrapper in self.wrappers:
            env = wrapper(env)
            refuse_other(env, wrapper)
        return env

    def with_frames(self) -> Any:
        """Make the same environment, rendered to images."""
        return self(render_mode="rgb_array")


def blueprint(
    env: Any,
    num_envs: int | None,
    env_kwargs: Mapping[str, Any] | None,
    is_remote: bool = False,
    allow_pickle: bool = True,
) -> Blueprint:
    """Return the `Blueprint` for the user's arguments. Raises SpecError if they are invalid.

    `is_remote`: it is sent to machines that may not have the user's files. `allow_pickle=False`: these machines accept
    no code, so `env` must be an id with plain arguments.
    """
    expect("ClusterEnv", "num_envs", num_envs, int | None, least=1)
    num_envs = None if num_envs is None else int(num_envs)  # numpy's integers are not plain data
    expect("ClusterEnv", "env_kwargs", env_kwargs, Mapping[str, Any] | None)

    if not allow_pickle:
        return _named(env, num_envs, env_kwargs)
    spec = None
    if isinstance(env, (str, EnvSpec)):
        spec = find_spec(env)
        maker, what = MakeFromSpec(spec, dict(env_kwargs or {})), f"env_kwargs of {spec.id}"
    elif isinstance(env, MakeFromSpec):  # by `make_vec`
        maker, spec, what = env, env.spec, f"env_kwargs or wrappers of {env.spec.id}"
    elif env_kwargs:
        raise SpecError("env_kwargs goes with an environment id; put the arguments into the thunk: lambda: make(...)")
    else:
        maker, what = _checked(env, num_envs)
    payload, packages = _pack(maker, what, is_remote)
    count = len(maker) if isinstance(maker, list) else num_envs or 1
    return Blueprint(count, payload, isinstance(maker, Vector), spec, packages=packages)


def _checked(env: Any, num_envs: int | None) -> tuple[Any, str]:
    """Return the user's function, list of functions or `Vector`, and its name for errors."""
    if isinstance(env, Vector):
        if num_envs is None:
            raise SpecError("Vector(fn) needs num_envs: ClusterEnv(Vector(fn), num_envs=...)")
        return env, "Vector(fn)"
    if isinstance(env, gym.Env):
        raise SpecError(
            f"env is an environment ({env}); pass a function that makes one, so that every worker can: "
            "ClusterEnv(lambda: MyEnv(...), num_envs=...)"
        )
    if callable(env):
        return env, "the environment function"
    if not isinstance(env, Sequence):
        raise refused("ClusterEnv", "env", env, "an id, an EnvSpec, a function, a list of functions, or Vector(fn)")
    if not env:
        raise SpecError("env is an empty list: at least one thunk is needed")
    for i, thunk in enumerate(env):
        if not callable(thunk):
            hint = "write lambda: ..., so that each worker makes its own"
            if isinstance(thunk, str):
                hint = f"for copies of one id, write ClusterEnv({thunk!r}, num_envs=...)"
            raise SpecError(f"ClusterEnv(env[{i}]={thunk!r}): expected a function that makes an environment; {hint}")
    if num_envs is not None and num_envs != len(env):
        raise SpecError(f"num_envs={num_envs} but env has {len(env)} thunks: leave num_envs out")
    return list(env), "the list of environment functions"


_FACE = ("reset", "step", "observation_space", "action_space")


def refuse_other(made: Any, maker: Callable[..., Any]) -> None:
    """Raise SpecError if the user's function returned something other than an environment."""
    if isinstance(made, VectorEnv):
        got, hint = "a vector environment", "pass one function per environment, or ClusterEnv(Vector(fn), num_envs=...)"
    elif made is None:
        got, hint = "None", "is its `return` missing?"
    elif isinstance(made, type):
        got, hint = f"the class {made.__name__}", f"write {made.__name__}(...)"
    elif missing := [name for name in _FACE if not hasattr(made, name)]:
        got, hint = f"{type(made).__name__} without {', '.join(missing)}", "return a gymnasium.Env"
    else:
        return
    raise SpecError(f"ClusterEnv(env=...): {_place(maker)} returned {got}, expected a gymnasium.Env; {hint}")


def _place(maker: Callable[..., Any]) -> str:
    code = getattr(maker, "__code__", None)
    where = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code is not None else ""
    return f"the function {_name(maker)}{where}"


def constructor_takes(env: str | EnvSpec, name: str) -> bool:
    """Return whether the environment's constructor, or `gymnasium.make`, has a parameter of this name."""
    entry = find_spec(env).entry_point
    try:
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        own = inspect.signature(creator).parameters if callable(creator) else {}
    except (ImportError, AttributeError, TypeError, ValueError):  # reported when an environment is made
        return False
    return name in own or name in inspect.signature(gym.make).parameters


def _named(env: Any, num_envs: int | None, env_kwargs: Mapping[str, Any] | None) -> Blueprint:
    if isinstance(env, MakeFromSpec):
        raise SpecError(
            "allow_pickle=False: nodes accept no code, so wrappers cannot be sent: apply them in a package on the "
            'nodes, whose id "package:Name-v0" makes the wrapped environment'
        )
    if not isinstance(env, str):
        raise SpecError(
            "allow_pickle=False: nodes accept no code, so env has to be an id that they know "
            '("package:Name-v0" imports the package there)'
        )
    spec = find_spec(env)
    try:
        payload = json.dumps({"id": env, "kwargs": dict(env_kwargs or {})}).encode()
    except (TypeError, ValueError) as error:
        raise SpecError(f"allow_pickle=False: env_kwargs of {env} must be JSON data: {error}") from None
    return Blueprint(num_envs or 1, payload, False, spec, True)


def find_spec(env: str | EnvSpec) -> EnvSpec:
    """Return the spec from the registry of this process, in which the user's script has registered its own ids."""
    if isinstance(env, EnvSpec):
        return env
    try:
        return _in_registry(env)
    except (gym.error.Error, ImportError) as error:
        raise SpecError(f"unknown environment id {env!r}: {error}") from error


def _in_registry(env: str) -> EnvSpec:
    """Find an id as `gymnasium.make` does: "module:Name-v0" imports the module, "Name" means the newest version."""
    module, _, name = env.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gym.registry:
        namespace, bare, version = parse_env_id(name)
        newest = find_highest_version(namespace, bare) if version is None else None
        name = name if newest is None else get_env_id(namespace, bare, newest)
    return gym.spec(name)


def _pack(made: Any, what: str, is_remote: bool) -> tuple[bytes, tuple[sources.Package, ...]]:
    """Pickle the makers of the environments with Gymnasium's registry, and find the packages that these name."""
    words: set[str] = set()

    def pickled(value: Any) -> bytes:
        if not is_remote:
            return dumps(value)
        data, found = dumps_with_words(value)
        words.update(found)
        return data

    payload = _Payload(_dumps(made, what, pickled), registry.pack(pickled))
    return pickle.dumps(payload), sources.collect(words) if is_remote else ()


def _dumps(made: Any, what: str, pickled: Callable[[Any], bytes]) -> bytes:
    try:
        return pickled(made)
    except Exception as error:  # pickling runs user code (__reduce__), which may raise anything
        if isinstance(made, list):  # pickle them one by one, to name the one that fails
            for i, thunk in enumerate(made):
                _dumps(thunk, f"env[{i}]", pickled)
        raise SpecError(
            f"{what} cannot be sent to a worker: {why(error)}. It captures something that cannot be pickled "
            "(a lock, an open file, a live environment): create that inside the function instead."
        ) from error


def _name(maker: Callable[..., Any]) -> str:
    return getattr(maker, "__qualname__", type(maker).__name__)


def load_makers(
    payload: bytes, num_envs: int, is_named: bool = False, is_here: bool = False
) -> list[Callable[[], Any]] | Vector:
    """Read the payload of a `Blueprint`: return one maker per slot, or the vector factory.

    `is_here`: this process made the payload, so its registry needs no change.
    """
    if is_named:
        given = json.loads(payload)
        try:
            spec = _in_registry(given["id"])
        except gym.error.Error as error:
            raise SpecError(
                f"{given['id']!r} is not registered on a node, which accepts no code from the script "
                '(allow_pickle=False): use "package:Name-v0", with a package that is installed there and registers it'
            ) from error
        return [MakeFromSpec(spec, given["kwargs"])] * num_envs
    made, registered = pickle.loads(payload)
    makers = pickle.loads(made)
    if not is_here:
        # After loading the makers: a package imported for them may have registered ids that the script replaced.
        registry.install(registered)
    if isinstance(makers, Vector):
        return makers
    return makers if isinstance(makers, list) else [makers] * num_envs


def own_spaces(plan: Blueprint) -> tuple[Any, Any]:
    """Make the environment of slot 0 in this process, and return its observation space and its action space.

    A node can only describe a space of a class that is not Gymnasium's: the head unpickles nothing that a node sends.
    """
    if plan.is_named:
        raise SpecError(
            "allow_pickle=False: the environment has a space of a class that is not Gymnasium's, which can only "
            "be sent by pickle; use Gymnasium's own spaces, or nodes that accept code"
        )
    makers = load_makers(plan.payload, plan.num_envs, is_here=True)
    if isinstance(makers, Vector):
        raise SpecError("Vector(fn) supports only Gymnasium's own spaces: a node cannot send a custom one to the head")
    try:
        env = makers[0]()
    except Exception as error:  # user code may raise anything
        raise SpecError(
            "the environment has a space of a class that is not Gymnasium's, so one environment is made in this "
            f"process too, but that failed: {type(error).__name__}: {error}"
        ) from error
    spaces = (env.observation_space, env.action_space)
    env.close()
    return spaces
