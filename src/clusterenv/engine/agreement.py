"""Decide whether the environments that workers built form one vector environment, and with which spaces. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from clusterenv.errors import SpacesError, SpecError
from clusterenv.spec import ObservationMode
from clusterenv.wire.requests import Built
from clusterenv.wire.spaces import DescribedSpace, describe, is_known

__all__ = ["Agreed", "agree"]

Spaces = tuple[Any, Any]
"""The observation space and the action space of one environment."""


class Agreed(NamedTuple):
    """Properties of the vector environment."""

    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    is_same: bool
    """Every environment has exactly `single_observation_space`, not only its shape and dtype."""


def agree(
    built: dict[int, Built],
    slots_of: list[list[int]],
    mode: ObservationMode,
    make_own: Callable[[], Spaces],
) -> Agreed:
    """Return the spaces for all slots. Raise SpacesError for the first slot that does not fit.

    `make_own` returns the spaces of slot 0, made in this process. It is called if a node could only describe a space,
    because the space's class is not one of Gymnasium's.
    """
    spaces_of = _by_slot(built, slots_of)
    if any(isinstance(space, DescribedSpace) for pair in spaces_of for space in pair):
        own = make_own()
        spaces_of = [
            (_real(slot, observation, own[0]), _real(slot, action, own[1]))
            for slot, (observation, action) in enumerate(spaces_of)
        ]
    observation_spaces, action_spaces = [pair[0] for pair in spaces_of], [pair[1] for pair in spaces_of]
    for name, space in (("observation", observation_spaces[0]), ("action", action_spaces[0])):
        if not isinstance(space, Space):
            raise SpecError(f"the environment's {name}_space is {space!r}: expected a gymnasium Space")
    single, batched = _observation_spaces(observation_spaces, mode)
    for slot, space in enumerate(action_spaces):
        if space is not action_spaces[0] and space != action_spaces[0]:
            raise SpacesError(
                "the sub-environments' action spaces are not equivalent: slot 0 has "
                f"{action_spaces[0]}, slot {slot} has {space}{_advice(space)}"
            )
    first = built[0]
    return Agreed(single, batched, action_spaces[0], first.metadata, first.render_mode, mode == "same")


def _by_slot(built: dict[int, Built], slots_of: list[list[int]]) -> list[Spaces]:
    spaces_of: dict[int, Spaces] = {}
    for worker, slots in enumerate(slots_of):
        its = built[worker]
        spaces_of.update(dict.fromkeys(slots, (its.observation_space, its.action_space)))
        spaces_of.update({slot: (observation, action) for slot, observation, action in its.others if slot in slots})
    return [spaces_of[slot] for slot in sorted(spaces_of)]


def _real(slot: int, space: Any, own: Any) -> Any:
    """Return the space made in this process in place of its description."""
    if not isinstance(space, DescribedSpace):
        return space
    if space != describe(own):
        raise SpacesError(
            f"the environments' spaces are not equivalent: slot {slot} has {space}, "
            f"the environment made in this process has {describe(own)}"
        )
    return own


def _observation_spaces(spaces: list[Any], mode: ObservationMode) -> Spaces:
    """Return (single, batched)."""
    if mode == "same":
        for slot, space in enumerate(spaces):
            if space is not spaces[0] and space != spaces[0]:
                raise SpacesError(
                    "ClusterEnv(observation_mode='same'): the sub-environments observation spaces are not equivalent. "
                    f"slot 0 has {spaces[0]}, slot {slot} has {space}{_advice(space)}. "
                    "If this is intentional, use `observation_mode='different'` instead."
                )
        return spaces[0], batch_space(spaces[0], len(spaces))
    single = spaces[0] if mode == "different" else mode[1]
    for slot, space in enumerate(spaces):
        if not _is_equivalent(single, space):
            raise SpacesError(
                "ClusterEnv(observation_mode='different' or a pair): the sub-environments' observation spaces do not "
                f"share a common shape and dtype: expected those of {single}, slot {slot} has {space}"
            )
    if mode != "different":
        return single, mode[0]
    try:
        return single, batch_differing_spaces(spaces)
    except (AssertionError, TypeError, ValueError) as error:
        raise SpacesError(
            f"ClusterEnv(observation_mode='different'): these observation spaces cannot be batched: {error}. "
            "Pass the pair (batched, single) of spaces instead."
        ) from error


def _is_equivalent(single: Any, space: Any) -> bool:
    try:
        return bool(is_space_dtype_shape_equiv(single, space))
    except NotImplementedError:  # a custom space: its shape and dtype are unknown
        return bool(single == space)


def _advice(space: Any) -> str:
    is_custom = not is_known(space)
    return " (custom spaces are compared by their __eq__)" if is_custom else ""
