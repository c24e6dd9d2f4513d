"""Check a batch of actions against the action space; return leaf arrays ready to copy, or one object per slot. Pure.

Raises before any environment is stepped, for a wrong shape, a wrong kind of dtype, or values outside the space; names
the slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate

from clusterenv.errors import ActionError, ActionTypeError
from clusterenv.memory.rows import Leaf, flatten, leaves_of
from clusterenv.wire.spaces import is_known

__all__ = ["ActionReader"]


class ActionReader:
    """Read batches of actions for `num_envs` environments with this single action space."""

    def __init__(self, space: Space[Any], num_envs: int, check: bool) -> None:
        self._space = space
        self._batched = batch_space(space, num_envs)
        self._num_envs = num_envs
        self._check = check
        self._leaves = leaves_of(space)
        self._leaf_spaces = list(flatten(space, space))  # a space has the same structure as its values
        self._bounds = [_bounds(sub) for sub in self._leaf_spaces]
        self._are_shared = all(leaf.dtype is not None for leaf in self._leaves)
        only = self._leaves[0]
        self._discrete = np.dtype(only.dtype) if isinstance(space, spaces.Discrete) else None
        self._low, self._high = only.low, only.high

    def place(self, actions: Any, slots: list[int] | None, shared: list[Any]) -> list[Any] | None:
        """Check actions for these slots (None: all) and write them into shared arrays, one per leaf.

        Spaces without a fixed size have no such arrays: their actions are returned, one per slot.
        """
        if (  # the hot path, for one Discrete space: two reductions check all values
            slots is None
            and self._discrete is not None
            and actions.__class__ is np.ndarray
            and actions.shape == (self._num_envs,)
            and actions.dtype == self._discrete
            and np.minimum.reduce(actions) >= self._low
            and np.maximum.reduce(actions) < self._high
        ):
            shared[0][...] = actions
            return None
        if not self._are_shared:
            return self.objects(actions, list(range(self._num_envs)) if slots is None else slots)
        for target, array in zip(shared, self.arrays(actions, slots), strict=True):
            if slots is None:
                target[...] = array
            else:
                target[slots] = array
        return None

    def objects(self, actions: Any, slots: list[int]) -> list[Any]:
        """Return one action per slot, for spaces without a fixed size."""
        batched = self._batched if len(slots) == self._num_envs else batch_space(self._space, len(slots))
        try:
            items = list(iterate(batched, actions))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ActionError(f"actions do not fit {batched}: {error}") from error
        if len(items) != len(slots):
            raise ActionError(f"{len(items)} actions for {len(slots)} environments")
        if self._check:
            for slot, item in zip(slots, items, strict=True):
                self._refuse_outside(item, slot)
        return items

    def _refuse_outside(self, action: Any, slot: int) -> None:
        try:
            values = list(flatten(self._space, action))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ActionError(f"the action of slot {slot} is not in {self._space}: {action!r}") from error
        for leaf, space, value in zip(self._leaves, self._leaf_spaces, values, strict=True):
            # Gymnasium never calls `contains` of a custom space, so it may not be usable.
            if is_known(space) and not space.contains(value):
                where = f"actions{leaf.name} of slot {slot}" if leaf.path else f"the action of slot {slot}"
                raise ActionError(f"{where} is not in {space}: {value!r}")

    def arrays(self, actions: Any, slots: list[int] | None) -> list[Any]:
        """Return one array [n, ...] per leaf."""
        n = self._num_envs if slots is None else len(slots)
        try:
            values = [actions] if not self._leaves[0].path else list(flatten(self._space, actions))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ActionError(
                f"actions must have the structure of {self._space}, each leaf batched over {n}: {error!r}"
            ) from error
        return [
            self._array(value, leaf, bounds, n, slots)
            for value, leaf, bounds in zip(values, self._leaves, self._bounds, strict=True)
        ]

    def _array(self, value: Any, leaf: Leaf, bounds: tuple[Any, Any] | None, n: int, slots: list[int] | None) -> Any:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a GPU, ragged lists
            raise ActionError(f"actions{leaf.name} cannot become a numpy array: {error}") from error
        if array.shape != (n, *leaf.shape):
            kind = ActionError if array.shape else ActionTypeError  # as Gymnasium, which cannot iterate over a number
            raise kind(
                f"actions{leaf.name} has shape {array.shape}, expected {(n, *leaf.shape)}: "
                f"one action of shape {leaf.shape} for each of {n} environments"
            )
        dtype = np.dtype(leaf.dtype)
        if array.dtype != dtype and not _fits(array.dtype, dtype):
            raise ActionError(f"actions{leaf.name} has dtype {array.dtype}, the action space says {dtype}")
        if self._check and bounds is not None:
            low, high = bounds
            # Written so that NaN fails too.
            if not ((array >= low) & (array <= high)).all():
                inside = ((array >= low) & (array <= high)).reshape(n, -1).all(axis=1)
                row = int(np.argmin(inside))
                slot = row if slots is None else slots[row]
                raise ActionError(
                    f"actions{leaf.name} of slot {slot} is outside the space: {array[row]!r} is not within "
                    f"{_plain(low)}..{_plain(high)}. Clip it, or turn the check off: Recovery(check=False)"
                )
        return array


def _fits(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether the dtypes are compatible: integers of any width for integers, any number for floats."""
    if wanted.kind in "iu":
        return given.kind in "biu"
    return np.can_cast(given, wanted, "same_kind")


def _bounds(space: Space[Any]) -> tuple[Any, Any] | None:
    """Return inclusive bounds, as scalars if all elements share them, because that compares faster."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return _scalar(space.start), _scalar(space.start + space.nvec - 1)
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    if isinstance(space, spaces.Box):
        return _scalar(space.low), _scalar(space.high)
    return None


def _scalar(bound: Any) -> Any:
    return bound.flat[0] if bound.size and (bound == bound.flat[0]).all() else bound


def _plain(bound: Any) -> Any:
    return bound if np.ndim(bound) else bound.item() if hasattr(bound, "item") else bound
