"""What a node says of a fragment is held against what was asked."""

from __future__ import annotations

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.cluster.checks import check_fragment
from clusterenv.memory.rows import Leaf
from clusterenv.wire.requests import DriftSamples, Finals, FragmentResult

LEAVES = (Leaf((), (4,), "float32"),)


def places(*values):
    return np.array(values, dtype=np.int64)


GOOD = FragmentResult(
    8,
    3,
    Finals(places(0, 7), places(1, 0), [np.zeros((2, 4), np.float32)]),
    [(3, 1, 2.5, 10, {"won": True})],
    {"mask": [(0, 0, None)]},
    None,
    None,
    DriftSamples(places(1), places(1), np.zeros((1, 2), np.float32)),
    0.1,
    0.2,
)
FINALS, SAMPLES = GOOD.finals, GOOD.samples


def test_a_good_one_passes():
    check_fragment(GOOD, 8, 2, LEAVES)


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": 9},
        {"num_steps": True},
        {"version": "3"},
        {"env_s": -1.0},
        {"policy_error": ("one",)},
        {"finals": FINALS._replace(t=places(0, 8))},
        {"finals": FINALS._replace(columns=places(0, -1))},
        {"finals": FINALS._replace(columns=places(0))},
        {"finals": FINALS._replace(leaves=[np.zeros((2, 5), np.float32)])},
        {"finals": FINALS._replace(leaves=[np.zeros((2, 4))])},
        {"finals": FINALS._replace(leaves=[])},
        {"finals": None},
        {"samples": SAMPLES._replace(params=np.zeros((2, 2), np.float32))},
        {"samples": SAMPLES._replace(t=np.zeros(1))},
        {"episodes": [(8, 0, 1.0, 1, {})]},
        {"episodes": [(0, 0, "1.0", 1, {})]},
        {"infos": {"mask": [(0, 2, None)]}},
        {"infos": {"mask": 7}},
        {"episodes": [1]},
        {"policy_error": 3},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(change):
    with pytest.raises(ce.ProtocolError, match="cannot be"):
        check_fragment(GOOD._replace(**change), 8, 2, LEAVES)


def make_with_missing_package():
    import a_package_that_nobody_has  # noqa: F401


def test_a_package_that_is_missing_on_a_node():
    backend = ce.Loopback(nodes=2)
    with pytest.raises(ce.EnvError, match=r"'a_package_that_nobody_has' is missing on node [01]: install it there"):
        ce.ClusterEnv(make_with_missing_package, 2, backend=backend)
