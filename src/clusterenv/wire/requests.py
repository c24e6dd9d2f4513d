"""Every message between the head and a worker: requests and their answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from clusterenv.policy.acting.named import Plain


class Sticky(NamedTuple):
    """A `set_attr` or `call` to repeat on every later incarnation of a slot."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_call: bool


class Build(NamedTuple):
    """Make the environments of these slots; answered by `Built`."""

    request: int
    slots: list[int]
    seeds: list[int]
    """For vector factories, which are seeded when they are made."""
    make: bool = True
    """False for a replacement, whose environments are made by `Rebuild`."""
    incarnations: list[int] | None = None
    """None: the first."""


class Attach(NamedTuple):
    """Map the shared memory with this layout; not answered."""

    layout: Any
    observation_space: Any
    action_space: Any


class Act(NamedTuple):
    knobs: dict[str, Any]
    incarnations: list[int]


class Acted(NamedTuple):
    """What the policy did in one step; one entry per slot."""

    slots: list[int]
    actions: Any
    logprobs: Any
    version: int


class Step(NamedTuple):
    """Step these slots. `actions` is None where they are in shared memory."""

    request: int
    slots: list[int]
    actions: list[Any] | None
    act: Act | None = None
    """Given where the worker's policy chooses the actions."""


class Reset(NamedTuple):
    request: int
    slots: list[int]
    seeds: list[int | None]
    options: dict[str, Any] | None


class Rebuild(NamedTuple):
    """Recreate the environments of these slots (incarnation, sticky attributes, seed), then reset them."""

    request: int
    slots: list[int]
    incarnations: list[int]
    seeds: list[int | None]
    options: dict[str, Any] | None
    stickies: list[list[Sticky]]


class Call(NamedTuple):
    request: int
    slots: list[int]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SetAttr(NamedTuple):
    request: int
    slots: list[int]
    name: str
    values: list[Any]


class SetPolicy(NamedTuple):
    """Act with this policy from now on; its weights follow."""

    request: int
    recipe: bytes | Plain
    """A cloudpickled `Recipe`, or plain data from which the worker makes the policy itself."""
    family: Any
    """None with plain data: the worker derives it."""
    mask: str | None
    seed: int
    info_keys: tuple[str, ...]


class LoadWeights(NamedTuple):
    """Load weights from the shared memory."""

    request: int
    version: int
    offset: int
    size: int
    number: int = 0
    """Of the weights, in the head's ledger: a node forwards the request once it has them."""


class MapArena(NamedTuple):
    """Map the shared memory for fragments with this layout; not answered."""

    layout: Any


class RunFragment(NamedTuple):
    """Act and step `num_steps` times; answered by a `Reply` whose result is a `FragmentResult`."""

    request: int
    num_steps: int
    side: int
    knobs: dict[str, Any]
    incarnations: list[int]
    sample_every: int = 0
    """Sample one in this many of each slot's states for drift; 0: none."""
    sample_within: int | None = None
    """Only within this many first steps: a recurrent policy is replayed from its state at row 0."""


class DriftSamples(NamedTuple):
    """Distribution parameters of the acting policy for some of the fragment's states."""

    t: Any  # [m]
    columns: Any  # [m]
    params: Any  # [m, P] float32


class Finals(NamedTuple):
    """The true last observations of episodes that ended."""

    t: Any  # [F]
    columns: Any  # [F]
    leaves: list[Any]  # [F, ...] each, in the order of the space's leaves; from another machine, maybe packed as bytes


class FragmentResult(NamedTuple):
    """What a fragment holds beside its arrays. Columns are numbered within the worker."""

    num_steps: int
    """Fewer than requested if the policy failed, or the node has to leave."""
    version: int
    finals: Finals
    episodes: list[tuple[int, int, float, int, dict[str, Any]]]
    """(t, column, return, length, final info) of those that were collected from their start."""
    infos: dict[str, list[tuple[int, int, Any]]]
    initial_state: Any
    policy_error: tuple[str, str] | None
    """(what, traceback)"""
    samples: DriftSamples | None
    env_s: float
    policy_s: float
    pace_s: Any = None
    """[K] seconds of a step of each environment, float32; None if none was timed."""
    not_sent: str = ""
    """Which info was left out because it is not plain data, and why; "" if none was."""
    forms: list[str] = []  # noqa: RUF012  never mutated: NamedTuple default
    """For each leaf of the observations, how it was sent to another machine, or why as it is."""
    saved_bytes: int = 0
    """Bytes that packing saved: set by the head, whatever a node says."""
    at_start: Any = None
    """[K] whether the last observation is the first of an episode."""
    over: Any = None
    """[K] whether the last observation ended an episode, and the next step is only its reset. None: of no column."""


class MissingKeys(NamedTuple):
    """Keys that no info had by the end of an episode; sent once, in place of the infos of a fragment's answer."""

    mask: str | None
    """Key of the action masks."""
    info_keys: list[str]
    seen: list[str]


class Evaluate(NamedTuple):
    """Play these episodes; answered by a `Reply` whose result is a list of `PlayedEpisode`."""

    request: int
    episodes: list[int]
    seed: int
    deterministic: bool
    record: int
    """Episodes below this number return their frames."""
    knobs: dict[str, Any]
    stickies: list[list[Sticky]]
    """For each slot of the worker: attributes and calls that its environments have."""
    stickies_epoch: int
    """Changes with `stickies`: environments of an earlier epoch are recreated."""


class PlayedEpisode(NamedTuple):
    number: int
    total: float
    length: int
    frames: list[Any] | None
    info: dict[str, Any] = {}  # noqa: RUF012  never mutated: NamedTuple default
    """Of its last step."""
    not_sent: str = ""
    """What of the info was left out because it cannot be copied or sent, and why: a line each; "" if nothing was."""


class Close(NamedTuple):
    request: int


class Fault(NamedTuple):
    """An environment raised, or returned what its spaces do not allow. Outside calls and evaluations, it is lost."""

    slot: int
    phase: str
    error: str
    traceback: str
    seed: int | None
    incarnation: int
    step: int


class Built(NamedTuple):
    request: int
    observation_space: Any = None
    action_space: Any = None
    metadata: dict[str, Any] = {}  # noqa: RUF012  never mutated: NamedTuple default
    render_mode: str | None = None
    others: list[tuple[int, Any, Any]] = []  # noqa: RUF012
    """(slot, observation space, action space) where these differ from those of this worker's first slot."""
    faults: list[Fault] = []  # noqa: RUF012


class Reply(NamedTuple):
    """Rows of these slots are in shared memory, or the results of a call are here."""

    request: int
    slots: list[int]
    infos: Any = None
    objects: list[tuple[int, list[Any]]] | None = None
    faults: list[Fault] = []  # noqa: RUF012  never mutated: NamedTuple default
    result: Any = None
    last: bool = True
    """False while more rows of the same request will follow."""
