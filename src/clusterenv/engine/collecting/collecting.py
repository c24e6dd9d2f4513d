"""Collecting with a policy on the workers: what each worker is sent before it acts, and what its answers mean. Pure.

`Collector` attaches a policy and starts fragments; the weights that a worker has to load come from the weight ledger.
The unfinished fragment of a lost worker is dropped as a whole: nothing is spliced. In a rollout the worker's
replacement runs it again, unless `on_loss="mask"`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from clusterenv.code.missing import missing_package
from clusterenv.engine.collecting.fragments import Fragment, Fragments
from clusterenv.engine.instructions import PutWeights
from clusterenv.engine.requests import Kind, Request
from clusterenv.engine.state import State
from clusterenv.errors import PolicyError
from clusterenv.events import Event
from clusterenv.memory.fragments import Arena, ArenaLayout, FragmentArrays, Side, empty_arrays
from clusterenv.memory.rows import leaves_of
from clusterenv.policy.acting.distributions import Family
from clusterenv.policy.acting.named import Plain
from clusterenv.wire.requests import (
    Evaluate,
    FragmentResult,
    LoadWeights,
    MapArena,
    MissingKeys,
    Reply,
    RunFragment,
    SetPolicy,
)
from clusterenv.worker.key_watch import explain

__all__ = ["Attached", "Collecting", "Samples", "of_slots"]

_REASONS = 8
"""How many infos that were not sent are named in an event."""


class Attached(NamedTuple):
    """A policy as it is sent to workers."""

    recipe: bytes | Plain
    family: Family
    mask: str | None
    seed: int
    info_keys: tuple[str, ...]


class Samples(NamedTuple):
    """Which states of a fragment are sampled to measure drift."""

    every: int = 0
    """Sample one state out of this many; 0: none."""
    within: int | None = None
    """Sample only the first steps of a fragment, this many; None: all."""


class Collecting:
    def __init__(self, state: State, action_space: Any) -> None:
        self._state = state
        self._action_space = action_space
        self.fragments = Fragments(len(state.workers))
        self.samples = Samples()
        self._arena: Arena | None = None
        self._arena_epoch = 0
        self._reported_missing: set[str | None] = {None}

    @property
    def _policy(self) -> Attached:
        attached = self._state.weights.attached
        assert attached is not None, "no policy is attached"
        return attached.policy

    # -- memory -----------------------------------------------------------------------------------------------

    def memory_for(self, num_steps: int, num_sides: int = 2) -> ArenaLayout | None:
        """Return the layout of the memory that such fragments need; None: the present memory is sufficient."""
        policy = self._policy
        masks = 0 if policy.mask is None else policy.family.num_params
        old = self._arena.layout if self._arena is not None else None
        enough = old is not None and old.num_steps >= num_steps and old.num_sides >= num_sides
        if old is not None and enough and old.num_masks == masks:
            return None
        rows = self._state.rows
        action = leaves_of(self._action_space)[0]
        return ArenaLayout(num_steps, rows.num_envs, rows.buffers.layout.obs, action, masks, num_sides)

    def use_memory(self, layout: ArenaLayout, memory: Any) -> None:
        self._arena = Arena(layout, memory)
        self._arena_epoch += 1

    def side(self, index: int) -> Side:
        assert self._arena is not None
        return self._arena.sides[index]

    def waiting(self, worker: int) -> tuple[FragmentArrays, list[int]]:
        """Return arrays without a row for a worker whose fragment is late, and its slots' incarnations.

        They are not those of the fragment, which the worker may still write to.
        """
        assert self._arena is not None
        slots = self._state.workers[worker].slots
        arrays = empty_arrays(self._arena.layout)
        for leaf, values in zip(arrays.obs, self._state.rows.last_obs(slots), strict=True):
            leaf[0, slots] = values
        return arrays, self._state.incarnations_of(slots)

    def incarnations_of(self, slots: list[int]) -> list[int]:
        return self._state.incarnations_of(slots)

    def close(self) -> None:
        self._arena = None  # views would keep the shared memory open

    # -- requests ---------------------------------------------------------------------------------------------

    def begin(self, knobs: dict[str, Any], is_leaving: Callable[[int], bool], now_s: float) -> None:
        """Request every fragment that can begin: its worker runs, and all of the worker's environments exist."""
        for worker in range(len(self._state.workers)):
            while (fragment := self.fragments.next(worker, is_leaving(worker))) and self.is_ready(worker):
                self._ask(fragment, knobs, now_s)

    def is_ready(self, worker: int) -> bool:
        """Return whether all environments of this worker exist; rebuild those that are missing.

        Only if all exist does a fragment start from first rows that were held: otherwise `step` would skip them.
        """
        slots, its = self._state.slots, self._state.workers[worker]
        if slots:
            gone = [slot for slot in its.slots if slots.is_gone(slot)]
            for slot in gone:
                slots.bring_back(slot)
            if gone or its.is_absent:
                return False
            for slot in its.slots:
                if slots.start_fragment(slot):
                    self._state.rows.adopt(slot)
        return not its.is_absent

    def are_all_there(self) -> bool:
        """Return whether every environment exists; rebuild those that are missing. Held first rows are not adopted."""
        slots = self._state.slots
        gone = slots.gone()
        for slot in gone:
            slots.bring_back(slot)
        return not gone and not self._state.workers.absent()

    def prepare(self, index: int, now_s: float) -> None:
        """Send a worker the policy and weights to act with, unless it already has them."""
        state, worker = self._state, self._state.workers[index]
        if worker.policy_epoch != state.weights.policy_epoch:
            worker.policy_epoch = state.weights.policy_epoch
            message = SetPolicy(state.requests.next_number(), *self._policy)
            if not isinstance(message.recipe, bytes):
                message = message._replace(family=None)
            state.ask(index, Kind.POLICY, worker.slots, message, now_s)
            state.weights.of(index).policy_changed(index)
        state.weights.push(index)
        weights = state.weights.of(index).missing(index)
        if weights is not None:
            number = state.requests.next_number()
            offset, transfer = state.weights.load(index, weights, number, now_s)
            if transfer is not None:
                state.out.append(PutWeights(transfer))
            load = LoadWeights(number, weights.version, offset, len(weights.data), weights.number)
            state.ask(index, Kind.POLICY, worker.slots, load, now_s)

    def prepare_all(self, now_s: float) -> None:
        """Prepare every running worker, even if some of its environments are missing: the others act."""
        for worker in self._state.workers:
            if not worker.is_absent:
                self.prepare(worker.index, now_s)

    def _ask(self, fragment: Fragment, all_knobs: dict[str, Any], now_s: float) -> None:
        state, worker = self._state, self._state.workers[fragment.worker]
        self.prepare(worker.index, now_s)
        if worker.arena_epoch != self._arena_epoch:
            assert self._arena is not None
            worker.arena_epoch = self._arena_epoch
            state.send(worker.index, MapArena(self._arena.layout))
        # A worker takes a missing knob as zero.
        knobs = {name: of_slots(value, worker.slots) for name, value in all_knobs.items() if np.ndim(value) or value}
        incarnations = state.incarnations_of(worker.slots)
        message = RunFragment(
            state.requests.next_number(), fragment.num_steps, fragment.side, knobs, incarnations, *self.samples
        )
        request = state.ask(worker.index, Kind.FRAGMENT, worker.slots, message, now_s)
        machine = state.weights.of(worker.index)
        acting = machine.evaluated or machine.assigned
        request.version = None if acting is None else acting.version
        request.info_keys = self._policy.info_keys
        self.fragments.asked(fragment, message.request, incarnations, now_s)

    def evaluate(
        self, episodes: int, seed: int, deterministic: bool, record: int, knobs: dict[str, Any], now_s: float
    ) -> list[Request]:
        """Ask every worker for its share of the episodes. All workers must be ready."""
        state, requests, workers = self._state, [], len(self._state.workers)
        plain = {name: float(np.mean(value)) for name, value in knobs.items()}
        incarnations = state.incarnations
        for worker in state.workers:
            self.prepare(worker.index, now_s)
            mine = list(range(episodes))[worker.index :: workers]
            if mine:
                stickies = [incarnations.stickies[slot] for slot in worker.slots]
                number = state.requests.next_number()
                message = Evaluate(
                    number, mine, seed, deterministic, record, plain, stickies, incarnations.stickies_epoch
                )
                requests.append(state.ask(worker.index, Kind.CALL, worker.slots, message, now_s))
        return requests

    def is_awaiting(self, requests: list[Request]) -> bool:
        """Return whether an answer to one of these is awaited, and the worker of none is lost."""
        open_ones = [request for request in requests if request.reply is None]
        return bool(open_ones) and all(map(self._state.requests.is_open, open_ones))

    # -- received messages ------------------------------------------------------------------------------------

    def replied(self, request: Request, reply: Reply, now_s: float) -> FragmentResult | None:
        """Process the answer to a request about the policy or for a fragment. Return the fragment's result."""
        result: FragmentResult | None = reply.result
        self._state.weights.of(request.worker).has_read(request.number)
        if request.kind is not Kind.FRAGMENT or result is None:
            if not self.fragments.is_abandoned(request.worker):  # else it was sent for an abandoned fragment
                self._check_policy(request.worker, result)
            return None
        fragment = self.fragments.arrived(request.worker, request.number, result, now_s)
        if fragment.is_wanted:
            self._check_policy(request.worker, result)
        slots = self._state.workers[request.worker].slots
        self.report_not_sent(request.worker, result.not_sent)
        if isinstance(reply.infos, MissingKeys):
            self.report_missing(reply.infos, slots)
        rows, side = self._state.rows, self.side(fragment.side)
        rows.keep_last_obs(slots, [leaf[result.num_steps] for leaf in side.obs])
        if result.num_steps:
            rows.transitions += int(np.count_nonzero(side.valid[: result.num_steps, slots]))
            rows.collected(slots, side.valid[0], result.at_start, result.over)
            if result.pace_s is not None:
                rows.buffers.pace_s[slots] = result.pace_s
        return result

    def _check_policy(self, index: int, result: FragmentResult | None) -> None:
        """Add the error of a policy that failed on a worker, so that it is raised; of several, only the first."""
        state = self._state
        if result is None or result.policy_error is None or any(isinstance(e, PolicyError) for e in state.errors):
            return
        what, text = result.policy_error
        where = f"worker {index}"
        if state.workers.num_nodes > 1:
            where += f" on node {state.workers[index].node}"
        advice = missing_package(what, where)
        what = f"{what} ({where})" + (f": {advice}" if advice else "")
        state.errors.append(PolicyError(f"{what}\n{text}", remote_traceback=text))

    def report_not_sent(self, index: int, *reasons: str) -> None:
        """Report the infos that a worker left out of an answer, if any: one event, so that others stay in the log.

        Only the first event is a warning. Each reason has a line for each key, and is "" if nothing was left out.
        """
        lines = dict.fromkeys(line for reason in reasons for line in reason.splitlines())
        if not lines:
            return
        reason = "; ".join(list(lines)[:_REASONS])
        if len(lines) > _REASONS:
            reason += f"; and {len(lines) - _REASONS} more"
        events = self._state.events
        level = logging.DEBUG if "info_not_sent" in events.counts else logging.WARNING
        events.add(Event("info_not_sent", reason, tuple(self._state.workers[index].slots), index), level=level)

    def report_missing(self, missing: MissingKeys, slots: list[int]) -> None:
        """Warn about keys that no info of these slots had; once per key, for whichever worker reports it first."""
        mask = None if missing.mask in self._reported_missing else missing.mask
        keys = [key for key in missing.info_keys if key not in self._reported_missing]
        self._reported_missing |= {mask, *keys}
        for text in explain(missing._replace(mask=mask, info_keys=keys)):
            self._state.events.add(Event("missing_key", text, tuple(slots)))

    def worker_exited(self, worker: int, is_moved: bool) -> None:
        """Forget the weights and fragments of a worker whose process is gone: its replacement has nothing."""
        self._state.weights.of(worker).worker_lost(worker)
        if is_moved:
            self.fragments.worker_moved(worker)
        else:
            self.fragments.worker_lost(worker)


def of_slots(value: Any, slots: list[int]) -> Any:
    """Return a knob's value for these slots: one number for all, or an array with one each."""
    array = np.asarray(value)
    return array[slots] if array.ndim else value
