"""Check the answers of nodes completely before any part of them is used. Pure.

`check` takes a request, what is known about its worker, and an answer as it arrived; it returns the reply, or raises
ProtocolError. It writes nothing: the executor writes rows and fragments afterwards, and `record` updates the request.
Executors of this machine do not use this module: they trust their own workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from clusterenv.engine.checking import is_int, is_policy_error, is_reason, is_text, need
from clusterenv.engine.fragment_answers import check_fragment, check_missing, unpack_arrays, unpack_finals
from clusterenv.engine.requests import Kind, Request
from clusterenv.errors import ProtocolError
from clusterenv.memory.fragments import ArenaLayout
from clusterenv.memory.progress import PHASES
from clusterenv.memory.rows import Layout
from clusterenv.memory.transfer import check_rows, fragment_sizes, row_bytes
from clusterenv.wire.channel import Brings, plain
from clusterenv.wire.infos import Column
from clusterenv.wire.parts import BESIDE_BYTES, RECORD_BYTES, RESULT_BYTES, join
from clusterenv.wire.requests import (
    Acted,
    Built,
    Call,
    Evaluate,
    Fault,
    FragmentResult,
    PlayedEpisode,
    Reply,
    SetAttr,
    Step,
)

__all__ = ["Known", "check", "check_step", "limit_bytes", "record", "unpack"]

_PHASES = frozenset((*PHASES, "evaluate"))


class Known(NamedTuple):
    """What the answers of a worker are checked against, besides the request."""

    slots: list[int]
    rows: Layout | None = None
    fragments: ArenaLayout | None = None
    is_vector: bool = False
    """Its environments fail together."""

    @property
    def num_objects(self) -> int:
        """Number of leaves of an observation that are not in shared memory."""
        return sum(leaf.dtype is None for leaf in self.rows.obs) if self.rows is not None else 0


def limit_bytes(request: Request, known: Known) -> int:
    """Return the maximum total size of all answers to this request."""
    if request.brings is Brings.ROWS:
        assert known.rows is not None
        return 3 * row_bytes(known.rows) * len(request.slots) + BESIDE_BYTES
    if request.brings is Brings.FRAGMENT:
        assert known.fragments is not None
        return 3 * sum(fragment_sizes(known.fragments, len(known.slots), request.message.num_steps)) + BESIDE_BYTES
    message = request.message
    if isinstance(message, Evaluate):
        return BESIDE_BYTES + RECORD_BYTES * sum(number < message.record for number in message.episodes)
    if isinstance(message, Call):
        return BESIDE_BYTES + RESULT_BYTES * len(request.slots)
    return BESIDE_BYTES


def check(request: Request, known: Known, slots: Sequence[int], last: bool, frames: Sequence[Any]) -> Any:
    """Return the reply in these frames: a `Reply` or `Built`, or the request's number if there are only rows.

    Args:
        slots, last: from the header of the answer: the slots of its rows, and whether it is the last answer.
    """
    try:
        return _check(request, known, slots, last, frames)
    except ProtocolError:
        raise
    except Exception as error:  # whatever malformed data raises here is the node's fault
        raise ProtocolError(f"an answer that cannot be checked: {type(error).__name__}: {error}") from None


def unpack(request: Request, known: Known, packed: Sequence[int], frames: Sequence[Any]) -> list[Any]:
    """Return the frames of an answer, of which these arrays are packed, with all of them unpacked."""
    try:
        need(request.kind is Kind.FRAGMENT and known.fragments is not None, "packed arrays, where none were requested")
        assert known.fragments is not None
        arrays = unpack_arrays(request.message.num_steps, len(known.slots), known.fragments, packed, frames[1:])
        return [*frames[:1], *arrays]
    except ProtocolError:
        raise
    except Exception as error:  # as above
        raise ProtocolError(f"an answer that cannot be unpacked: {type(error).__name__}: {error}") from None


def check_step(request: Request, known: Known, body: Any) -> Any:
    """Return a worker's reply to a whole step without its rows, whose bytes are checked when they are written."""
    try:
        if not len(body):
            return _check_plain_rows(request, known, request.slots, True)
        return _check_reply(request, known, request.slots, True, [body])
    except ProtocolError:
        raise
    except Exception as error:  # as above
        raise ProtocolError(f"an answer that cannot be checked: {type(error).__name__}: {error}") from None


def record(request: Request, slots: Iterable[int], reply: Any, size: int) -> Any:
    """Record in the request what has arrived. Return the reply to pass on; None for a part of a call's results."""
    request.received_bytes += size
    request.remaining.difference_update(slots)
    if request.kind is not Kind.CALL or not isinstance(reply.result, list):
        return reply
    join(request.parts, reply.result)
    return reply._replace(result=request.parts) if reply.last else None


def _check(request: Request, known: Known, slots: Sequence[int], last: bool, frames: Sequence[Any]) -> Any:
    size = sum(map(len, frames))
    limit = limit_bytes(request, known)
    need(request.received_bytes + size <= limit, f"{request.received_bytes + size} bytes, more than {limit}")
    need(bool(frames), "no frames")
    _check_frames(request, known, slots, frames)
    if request.brings is Brings.ROWS:
        need(all(a < b for a, b in pairwise(slots)), "slots that do not ascend")
        need(request.remaining.issuperset(slots), f"rows of slots {list(slots)}, which are not awaited")
    if not len(frames[0]):
        return _check_plain_rows(request, known, slots, last)
    return _check_reply(request, known, slots, last, frames)


def _check_reply(request: Request, known: Known, slots: Sequence[int], last: bool, frames: Sequence[Any]) -> Any:
    reply = plain().unpack(frames[0])
    if request.kind is Kind.BUILD and isinstance(reply, Built):
        need(last and not slots, "a header that differs from its content")
        _check_built(request, known, reply)
        return reply
    need(isinstance(reply, Reply), f"a {type(reply).__name__} instead of a reply")
    need(is_int(reply.request) and reply.request == request.number, "the number of another request")
    need(reply.last is last and isinstance(reply.slots, list), "a header that differs from its content")
    need(all(map(is_int, reply.slots)) and reply.slots == list(slots), "a header that differs from its content")
    _check_faults(request, known, reply)
    if request.brings is Brings.ROWS:
        _check_row_reply(request, known, reply)
    elif request.kind is Kind.FRAGMENT:
        return _check_fragment_reply(request, known, reply, frames[1:])
    else:
        need(not reply.slots and reply.infos is None and reply.objects is None, "rows that were not requested")
        _check_result(request, known, reply)
    return reply


def _check_frames(request: Request, known: Known, slots: Sequence[int], frames: Sequence[Any]) -> None:
    """Check the number of frames and their sizes against the layout."""
    if request.brings is Brings.ROWS:
        need(len(frames) == 2 and known.rows is not None, f"{len(frames)} frames instead of 2")
        assert known.rows is not None
        check_rows(row_bytes(known.rows), len(slots), frames[1])
    elif request.brings is not Brings.FRAGMENT:  # a fragment's sizes follow from its result
        need(len(frames) == 1, f"{len(frames)} frames instead of 1")


def _check_plain_rows(request: Request, known: Known, slots: Sequence[int], last: bool) -> int:
    """Check an answer without plain data: rows of a whole step and nothing else."""
    need(request.brings is Brings.ROWS and request.message is None, "no content")
    need(not known.num_objects, "no observations of spaces without a fixed size")
    need(last and request.remaining == set(slots), "only some rows of a whole step")
    return request.number


# -- rows -------------------------------------------------------------------------------------------------------


def _check_row_reply(request: Request, known: Known, reply: Reply) -> None:
    acts = isinstance(request.message, Step) and request.message.act is not None
    if acts and isinstance(reply.result, FragmentResult):  # the policy failed, and nothing was stepped
        untouched = request.remaining == set(request.slots) and not reply.slots and reply.last
        need(untouched and not reply.faults, "rows although the policy failed")
        _check_policy_error(reply.result)
        return
    need(bool(reply.slots), "no rows")
    need(reply.last is (len(request.remaining) == len(reply.slots)), "an end that does not match the last row")
    failed = {fault.slot for fault in reply.faults}
    good = [slot for slot in reply.slots if slot not in failed]
    if reply.infos is not None:
        _check_columns(reply.infos, set(good))
    _check_objects(reply.objects, good, known.num_objects)
    if acts and reply.last:
        _check_acted(reply.result, request.slots, known.rows)
    else:
        need(reply.result is None, "a result that was not requested")


def _check_columns(columns: Any, rows: set[int]) -> None:
    """Check info columns, including nested ones: each covers some of these rows, with one value per row."""
    need(isinstance(columns, dict), "infos that are not columns")
    for column in columns.values():
        need(isinstance(column, Column) and isinstance(column.rows, list), "infos that are not columns")
        own = column.rows
        need(all(map(is_int, own)) and rows.issuperset(own), "infos of other slots")
        need(all(a < b for a, b in pairwise(own)), "infos whose slots do not ascend")
        values = column.values
        if column.kind == "dict":
            _check_columns(values, set(own))
        elif column.kind == "object":
            need(isinstance(values, list) and len(values) == len(own), "infos of the wrong length")
        elif column.kind in ("number", "array"):
            fits = isinstance(values, np.ndarray) and values.ndim > 0 and len(values) == len(own)
            need(fits, "infos of the wrong length")
            if column.kind == "number":
                of_type = isinstance(column.type, type) and np.dtype(column.type).type is values.dtype.type
                need(values.ndim == 1 and of_type, "infos of the wrong type")
        else:
            need(False, "infos of an unknown kind")


def _check_objects(objects: Any, good: list[int], leaves: int) -> None:
    """Check values that are not in shared memory: each row has all such leaves, if the space has any."""
    if not leaves:
        need(objects is None, "objects that were not requested")
        return
    need(isinstance(objects, list) or (objects is None and not good), "no observations")
    for entry in objects or ():
        need(isinstance(entry, (tuple, list)) and len(entry) == 2, "objects that are not pairs")
        need(is_int(entry[0]) and isinstance(entry[1], list) and len(entry[1]) == leaves, "objects of the wrong length")
    need(sorted(entry[0] for entry in objects or ()) == good, "objects of other slots")


def _check_acted(acted: Any, slots: list[int], layout: Layout | None) -> None:
    need(isinstance(acted, Acted), "no actions")
    need(isinstance(acted.slots, list) and acted.slots == slots, "actions of other slots")
    assert layout is not None
    leaf = layout.actions[0]
    actions, logprobs = acted.actions, acted.logprobs
    need(isinstance(actions, np.ndarray) and actions.shape == (len(slots), *leaf.shape), "actions of the wrong shape")
    need(actions.dtype.kind in "biuf", "actions of the wrong type")
    fits = isinstance(logprobs, np.ndarray) and logprobs.shape == (len(slots),) and logprobs.dtype.kind == "f"
    need(fits, "log-probabilities of the wrong shape")
    need(is_int(acted.version) and -1 <= acted.version < 1 << 62, "an unknown version")


# -- everything else --------------------------------------------------------------------------------------------


def _check_fragment_reply(request: Request, known: Known, reply: Reply, arrays: Sequence[Any]) -> Reply:
    """Return the reply with its final observations unpacked."""
    result = reply.result
    need(isinstance(result, FragmentResult), "no fragment result")
    need(reply.last and reply.objects is None, "a fragment in parts")
    done = result.num_steps
    need(is_int(done) and 0 <= done <= request.message.num_steps, "the wrong number of steps")
    assert known.fragments is not None
    sizes = fragment_sizes(known.fragments, len(known.slots), done)
    need([len(array) for array in arrays] == sizes, "arrays that do not have the sizes of the layout")
    if not reply.slots:  # there was no policy
        need(not reply.faults and reply.infos is None, "rows although the policy failed")
        _check_policy_error(result)
        return reply._replace(result=result._replace(forms=[], saved_bytes=0))
    need(reply.slots == known.slots, "a fragment of other slots")
    check_missing(reply.infos)
    result = unpack_finals(result, len(known.slots), known.fragments, arrays)
    check_fragment(result, request, len(known.slots), known.fragments, arrays)
    return reply._replace(result=result)


def _check_policy_error(result: FragmentResult) -> None:
    is_error = is_policy_error(result.policy_error)
    need(is_error and result.num_steps == 0 and result.not_sent == "", "a failed policy without its error")


def _check_result(request: Request, known: Known, reply: Reply) -> None:
    """Check the answer to a call, an evaluation, a build or a request about the policy."""
    message, result = request.message, reply.result
    if request.kind is not Kind.CALL:
        need(reply.last, "parts, where only a whole answer is allowed")
        if isinstance(result, FragmentResult) and request.kind is Kind.POLICY:
            _check_policy_error(result)
        else:
            need(result is None, "a result that was not requested")
            need(request.kind is not Kind.BUILD or bool(reply.faults), "no environments")
        return
    if reply.faults:
        need(reply.last and result is None, "results beside a fault")
        return
    need(isinstance(result, list), "no results")
    if isinstance(message, Evaluate):
        # A vector environment begins the next episode before its last frame could be rendered.
        _check_episodes(message, [*request.parts], result, reply.last, 0 if known.is_vector else 1)
    elif not known.is_vector:
        count = 0 if isinstance(message, SetAttr) else len(request.slots)
        so_far = len(request.parts) + len(result)
        need(so_far == count if reply.last else so_far < count, f"{so_far} results, where {count} are expected")


def _check_episodes(message: Evaluate, so_far: list[Any], part: list[Any], last: bool, more_frames: int) -> None:
    """Check a part of the episodes; recorded ones have a frame for each step, and `more_frames`."""
    for episode in part:
        need(isinstance(episode, PlayedEpisode) and is_int(episode.number), "results that are not episodes")
        fits = isinstance(episode.total, float) and is_int(episode.length) and 0 <= episode.length < 1 << 62
        need(fits and episode.number in message.episodes, "episodes that were not requested")
        frames = isinstance(episode.frames, list) if episode.number < message.record else episode.frames is None
        need(frames, "frames that do not match the request")
        need(type(episode.info) is dict and is_reason(episode.not_sent), "an episode whose info is malformed")
    join(so_far, part)
    numbers = [episode.number for episode in so_far]
    need(len(set(numbers)) == len(numbers), "a duplicate episode")
    if last:
        need(sorted(numbers) == sorted(message.episodes), "too few episodes")
        for episode in so_far:
            frames, count = episode.frames, episode.length + more_frames
            need(frames is None or len(frames) == count, "the wrong number of frames")


def _check_built(request: Request, known: Known, built: Built) -> None:
    need(is_int(built.request) and built.request == request.number, "the number of another request")
    _check_faults(request, known, built)
    need(isinstance(built.metadata, dict), "malformed metadata")
    need(built.render_mode is None or is_text(built.render_mode), "a malformed render mode")
    need(isinstance(built.others, list), "malformed spaces")
    spaces = [built.observation_space, built.action_space]
    for slot, *its in built.others:
        need(is_int(slot) and slot in known.slots and len(its) == 2, "spaces of other slots")
        spaces += its
    for space in spaces:
        need(not isinstance(space, np.ndarray), "malformed spaces")  # arrays do not compare as a whole


def _check_faults(request: Request, known: Known, reply: Reply | Built) -> None:
    need(isinstance(reply.faults, list) and len(reply.faults) <= len(known.slots), "malformed faults")
    own: list[int] = known.slots
    if request.brings is Brings.ROWS and not known.is_vector:
        own = getattr(reply, "slots", [])
    elif request.kind in (Kind.CALL, Kind.BUILD):
        own = [-1, *known.slots]
    elif request.kind is Kind.POLICY:
        own = []
    for fault in reply.faults:
        need(isinstance(fault, Fault) and is_int(fault.slot) and fault.slot in own, "faults of other slots")
        need(isinstance(fault.phase, str) and fault.phase in _PHASES, "a fault in an unknown phase")
        need(is_text(fault.error) and is_text(fault.traceback), "a fault without text")
        numbers = [fault.incarnation, fault.step, 0 if fault.seed is None else fault.seed]
        need(all(map(is_int, numbers)), "a fault with a malformed incarnation, step or seed")
    need(len({fault.slot for fault in reply.faults}) == len(reply.faults), "a duplicate fault")
