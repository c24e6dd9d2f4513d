"""Whether the environments that workers built can form one vector environment. Pure."""

from __future__ import annotations

from gymnasium import Space

from clusterenv.errors import SpecError
from clusterenv.wire.requests import Built

__all__ = ["agree"]


def agree(built: dict[int, Built], slots_of: list[list[int]]) -> Built:
    """What slot 0's worker built, if all others have the same spaces; else SpecError by name."""
    first = built[0]
    for worker in sorted(built):
        other = built[worker]
        odd_slot, odd = other.odd_slot, other.odd_spaces
        if odd_slot is None and (
            other.observation_space != first.observation_space or other.action_space != first.action_space
        ):
            odd_slot, odd = slots_of[worker][0], (other.observation_space, other.action_space)
        if odd_slot is not None:
            raise SpecError(
                "all environments must have the same spaces: slot 0 has "
                f"{first.observation_space} and {first.action_space}, slot {odd_slot} has {odd[0]} and {odd[1]}"
            )
    for name, space in (("observation", first.observation_space), ("action", first.action_space)):
        if not isinstance(space, Space):
            raise SpecError(f"the environment's {name}_space is {space!r}: expected a gymnasium Space")
    return first
