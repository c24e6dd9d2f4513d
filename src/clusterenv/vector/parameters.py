"""Check the arguments of the calls of `ClusterEnv`: modes, seeds, masks, slots. Pure.

Where Gymnasium refuses the same argument, the error has Gymnasium's type and text.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from clusterenv.arguments import closest, expect, refused
from clusterenv.errors import ArgumentTypeError, SpecError, UsageError
from clusterenv.spec import ObservationMode


@dataclass(frozen=True)
class ResetArguments:
    """The arguments of a reset; seeds and bases per slot."""

    seeds: list[int | None]
    bases: list[int | None]
    """The seeds from which those of later incarnations are derived."""
    mask: Any
    """The slots to reset, bool [num_envs]; None: all."""
    slots: list[int]
    options: dict[str, Any] | None


def read_autoreset_mode(mode: AutoresetMode | str | None, is_vector: bool) -> AutoresetMode | None:
    """Return the mode; None: that of the user's own vector environment (`is_vector`)."""
    if mode is None:
        return None if is_vector else AutoresetMode.NEXT_STEP
    try:
        return AutoresetMode(mode)
    except ValueError:
        names = [known.value for known in AutoresetMode]
        near = closest(mode, names) if isinstance(mode, str) else None
        wanted = f"an AutoresetMode, or one of {', '.join(names)}"
        hint = f'did you mean "{near}"?' if near else ""
        raise refused("ClusterEnv", "autoreset_mode", mode, wanted, hint) from None


def read_observation_mode(mode: Any, is_vector: bool) -> ObservationMode:
    """Return the checked mode. `is_vector`: the user's own vector environment batches the observations."""
    if mode == "same":
        return "same"
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            kinds = " and ".join(str(type(space)) for space in mode)
            raise ArgumentTypeError(f"Expected both elements of observation_mode to be Spaces, got {kinds}")
    elif mode != "different":
        near = closest(mode, ("same", "different")) if isinstance(mode, str) else None
        raise SpecError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}" + (f'; did you mean "{near}"?' if near else "")
        )
    if is_vector:
        raise SpecError("Vector(fn) batches its observations itself: leave observation_mode out")
    checked: ObservationMode = mode
    return checked


def read_reset(call: str, seed: Any, options: Any, num_envs: int) -> ResetArguments:
    """Return the checked arguments of `reset` or `reset_async`."""
    expect(call, "options", options, Mapping[Any, Any] | None)
    seeds, bases = read_seeds(seed, num_envs)
    mask, options = read_mask(options, num_envs)
    slots = list(range(num_envs)) if mask is None else np.flatnonzero(mask).tolist()
    return ResetArguments(seeds, bases, mask, slots, options)


def read_seeds(seed: Any, num_envs: int) -> tuple[list[int | None], list[int | None]]:
    """Return, per slot, the seed of this reset and the base from which later incarnations derive their seeds."""
    if seed is None:
        return [None] * num_envs, [None] * num_envs
    if isinstance(seed, (list, tuple, np.ndarray)):
        if len(seed) != num_envs:
            raise SpecError(f"reset(seed=...): {len(seed)} seeds for {num_envs} environments")
        try:
            seeds = [None if value is None else operator.index(value) for value in seed]
        except TypeError:
            raise refused("reset", "seed", seed, "whole numbers, or None for a slot") from None
        return seeds, list(seeds)
    expect("reset", "seed", seed, int | Sequence[int] | None)
    base = operator.index(seed)
    return [base + i for i in range(num_envs)], [base] * num_envs


def read_mask(options: dict[str, Any] | None, num_envs: int) -> tuple[Any, dict[str, Any] | None]:
    """Return the mask of a reset, if it has one, and the options that the environments get."""
    if options is None or "reset_mask" not in options:
        return None, options
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise ArgumentTypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise SpecError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise ArgumentTypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise SpecError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    # Do not mutate the caller's dict: wrappers around this environment read the mask after this call.
    return mask, {key: value for key, value in options.items() if key != "reset_mask"}


def read_indices(call: str, name: str, values: Any) -> list[int]:
    """Return slots as ints; fast for valid slots."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        hint = "write np.flatnonzero(mask)" if getattr(values, "dtype", None) == np.bool_ else ""
        raise refused(call, name, values, "a list of whole numbers", hint) from None


def read_send_slots(slots: Any, num_envs: int) -> list[int]:
    """Return the checked slots of `send`."""
    chosen = read_indices("send", "slots", slots)
    if not chosen:
        raise UsageError("send(): slots is empty")
    if len(set(chosen)) != len(chosen) or min(chosen) < 0 or max(chosen) >= num_envs:
        raise UsageError(f"send(): slots must be different and within 0..{num_envs - 1}: {chosen}")
    return chosen


def check_recv(min_envs: Any, timeout_s: Any, in_flight: int) -> None:
    """Raise unless `recv` can wait for this many rows; fast if both arguments are None."""
    if min_envs is not None:
        expect("recv", "min_envs", min_envs, int)
        if not 1 <= min_envs <= in_flight:
            raise UsageError(f"recv(min_envs={min_envs}): {in_flight} slots are in flight")
    if timeout_s is not None:
        expect("recv", "timeout_s", timeout_s, float, least=0)


def read_timeout(call: str, timeout: Any) -> float | None:
    """Return how long a `_wait` may take, in seconds; None: without limit."""
    if timeout is not None:
        expect(call, "timeout", timeout, float, least=0)
    checked: float | None = timeout
    return checked


def read_slots(call: str, slots: Any, num_envs: int, is_vector: bool) -> list[int]:
    """Return the slots (None: all) whose method is called or attribute is read or set."""
    if slots is None:
        return list(range(num_envs))
    chosen = read_indices(call, "slots", slots)
    is_mask = isinstance(slots, (list, tuple)) and any(isinstance(slot, bool) for slot in slots)
    if is_mask or len(set(chosen)) != len(chosen) or not all(0 <= slot < num_envs for slot in chosen):
        raise refused(call, "slots", slots, f"different slots within 0..{num_envs - 1}")
    if is_vector:
        raise UsageError(f"{call}(slots=...): a Vector(fn) has attributes for all its slots; leave slots out")
    return chosen


def read_values(name: str, values: Any, count: int) -> Sequence[Any]:
    """Return the values to set, one for each of `count` environments."""
    if not isinstance(values, (list, tuple)):
        return [values] * count
    if len(values) != count:
        raise SpecError(f"set_attr({name!r}): {len(values)} values for {count} environments; pass one, or one for each")
    return values


def check_state(state: Any, num_envs: int) -> None:
    """Raise unless `load_state_dict` can resume from this state."""
    expect("load_state_dict", "state", state, Mapping[str, Any], hint="pass what state_dict() returned")
    if state.get("format") != 1:
        raise SpecError(f"load_state_dict: format {state.get('format')!r} is not known to this version")
    if state["num_envs"] != num_envs:
        raise SpecError(f"load_state_dict: saved with {state['num_envs']} environments, but there are {num_envs} here")
