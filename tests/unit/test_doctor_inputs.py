"""The doctor raises on nothing, whatever is missing from or wrong in the samples."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from clusterenv.monitor.doctor.diagnose import diagnose
from clusterenv.monitor.sample import (
    EventRecord,
    FragmentRecord,
    HostSample,
    NodeSample,
    Point,
    RunInfo,
    Sample,
    WorkerSample,
)

TEXTS = st.sampled_from(["", "x", "running", "absent", "killed", "joined", "missing", "step", "reset", "PENDING (x)"])
NUMBERS = st.none() | st.floats(-1, 1e9) | st.just(float("nan"))
COUNTS = st.integers(-1, 50)
FIELDS = {
    "float | None": NUMBERS,
    "int | None": st.none() | COUNTS,
    "str": TEXTS,
    "str | None": TEXTS | st.none(),
    "float": st.floats(0, 1e9),
    "int": COUNTS,
    "bool": st.booleans(),
    "tuple[int, int]": st.tuples(COUNTS, COUNTS),
}


def anything(struct, **more):
    """Return a strategy for a struct with arbitrary values in all fields of simple types, and `more`."""
    fields = {n: FIELDS[hint] for n, hint in struct.__annotations__.items() if hint in FIELDS and n not in more}
    return st.builds(struct, **fields, **more)


HOSTS = st.none() | anything(HostSample)
SAMPLES = anything(
    Sample,
    point=anything(Point),
    call=st.sampled_from(["", "rollout", "stream", "step"]),
    nodes=st.lists(anything(NodeSample, host=HOSTS), max_size=3),
    workers=st.lists(anything(WorkerSample), max_size=3),
    step_s=st.lists(st.floats(0, 10), max_size=4),
    incarnations=st.just([]),
    slow=st.just([]),
    last_loss=st.dictionaries(COUNTS, TEXTS, max_size=2),
    event_counts=st.just({}),
)
KINDS = st.sampled_from(["env_error", "worker_lost", "long_call", "node_lost", "log_not_written", "missing_key"])
EVENTS = anything(EventRecord, kind=KINDS, slots=st.just(()) | st.tuples(COUNTS), reason=TEXTS | st.just("node 1: x"))


@settings(max_examples=150, phases=[Phase.generate])  # shrinking inputs of this size takes minutes
@given(
    st.lists(SAMPLES, max_size=4),
    st.lists(EVENTS, max_size=4),
    st.lists(anything(FragmentRecord), max_size=4),
)
def test_nothing_raises(samples, events, fragments):
    info = RunInfo("", "", 0, "", "", 0, "", 0.0, "")
    for finding in diagnose(info, samples, events, fragments):
        assert 0.0 <= finding.lost <= 1.0 and finding.text
