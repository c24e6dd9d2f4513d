"""What an evaluation brings back beside returns: the last info of each episode, and what follows from it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv as ce
from clusterenv.wire.channel import with_plain_ends
from clusterenv.wire.requests import PlayedEpisode
from toys import Trouble, same

NETWORK = ce.Loopback(nodes=2)


class Goal(Trouble):
    """Episodes of 2 to 6 steps by their seed; those of an even length succeed. One info dict for the whole life."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, extra=None):
        super().__init__(0)
        self.info, self.extra = {}, extra

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        self.length = int(self.np_random.integers(2, 7))
        self.info |= {"is_success": False, "t": 0}
        return obs, self.info

    def step(self, action):
        obs, reward, *_ = super().step(action)
        self.info |= {"t": self.t, "is_success": self.t >= self.length and self.length % 2 == 0}
        if self.extra is not None:
            self.info["extra"] = self.extra()
        return obs, reward, self.t >= self.length, False, self.info

    def render(self):
        return np.full((4, 4, 3), self.t, np.uint8)


def evaluate(make, backend, **kwargs):
    with ce.ClusterEnv(make, 4, backend=backend) as envs:
        result = envs.collector(ce.RandomPolicy(), seed=1).evaluate(deterministic=False, **kwargs)
        return result, [event for event in envs.events() if event.kind == "info_not_sent"]


@pytest.mark.parametrize("backend", [ce.Local(workers=0), ce.Local(workers=2), NETWORK], ids=repr)
def test_an_evaluation_has_the_last_info_of_each_episode(backend):
    result, events = evaluate(Goal, backend, episodes=11, seed=3)
    lengths = result.lengths.tolist()
    assert len(set(lengths)) > 2 and [info["t"] for info in result.infos] == lengths and not events
    assert [info["is_success"] for info in result.infos] == [length % 2 == 0 for length in lengths]
    assert result.success_rate == np.mean([length % 2 == 0 for length in lengths])
    assert f"success rate {result.success_rate:.3g}" in repr(result)


def test_an_info_of_an_evaluation_that_cannot_travel_is_left_out_by_name():
    result, events = evaluate(lambda: Goal(object), NETWORK, episodes=5)
    assert [info["t"] for info in result.infos] == result.lengths.tolist()
    assert all("extra" not in info for info in result.infos) and result.success_rate is not None
    assert len(events) == 2, "one for each worker"
    assert all("info['extra'] is a" in event.reason and "plain data" in event.reason for event in events)


def holder():
    lock = threading.Lock()
    return lambda: lock


@pytest.mark.parametrize(
    "make", [threading.Lock, lambda: (i for i in ()), holder], ids=["lock", "generator", "closure"]
)
def test_an_info_of_an_evaluation_that_cannot_be_pickled_costs_no_worker(make):
    result, events = evaluate(lambda: Goal(make), ce.Local(workers=1), episodes=5)
    assert [info["t"] for info in result.infos] == result.lengths.tolist() and result.success_rate is not None
    assert all("extra" not in info for info in result.infos)
    assert events and "info['extra'] cannot be" in events[0].reason


class Reuses(Goal):
    """Its infos hold the same objects in all episodes."""

    def __init__(self, extra=None):
        super().__init__(extra)
        self.stats, self.success = {"lengths": [0]}, np.zeros(1)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.stats["lengths"][0], self.success[0] = self.t, info["is_success"]
        return obs, reward, terminated, truncated, {"stats": self.stats, "is_success": self.success, **self.rest()}

    def rest(self):
        return {} if self.extra is None else {"extra": self.extra()}


def reusing(num_envs, seeds):
    return SyncVectorEnv([Reuses] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("make", [Reuses, ce.Vector(reusing)], ids=["single", "vector"])
@pytest.mark.parametrize("backend", [ce.Local(workers=0), ce.Local(workers=1), ce.Loopback(nodes=1)], ids=repr)
def test_objects_that_an_environment_uses_again_are_copied_when_an_episode_ends(backend, make):
    result, events = evaluate(make, backend, episodes=11, seed=3)
    lengths = result.lengths.tolist()
    assert len(set(lengths)) > 2 and [info["stats"]["lengths"][0] for info in result.infos] == lengths
    assert result.success_rate == np.mean([length % 2 == 0 for length in lengths]) and not events


@pytest.mark.parametrize("backend", [ce.Local(workers=0), ce.Local(workers=1)], ids=repr)
def test_an_info_that_cannot_be_copied_is_left_out_by_name(backend):
    result, events = evaluate(lambda: Reuses(threading.Lock), backend, episodes=5)
    assert [info["stats"]["lengths"][0] for info in result.infos] == result.lengths.tolist()
    assert all("extra" not in info for info in result.infos)
    assert events and "info['extra'] cannot be copied: " in events[0].reason


def test_what_cannot_be_copied_travels_as_its_repr_where_that_is_wanted():
    backend = ce.Loopback(nodes=1, other_infos="repr")
    result, events = evaluate(lambda: Reuses(threading.Lock), backend, episodes=5)
    assert all("lock" in info["extra"] for info in result.infos) and not events


def test_infos_of_an_evaluation_that_are_too_large_cost_no_node():
    """The first ones of each worker fit; what is beyond the limit is left out, and named."""
    result, events = evaluate(lambda: Goal(lambda: np.zeros(5 << 20, np.uint8)), ce.Loopback(nodes=1), episodes=8)
    has = ["extra" in info for info in result.infos]
    assert len(result.returns) == 8 and 0 < sum(has) < 8
    assert len(events) == 1 and events[0].reason.count("bytes") == has.count(False)


class Several(Goal):
    """Episodes leave out "odd" or "even", by their length, and "extra" in all of them."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, ("odd" if self.length % 2 else "even"): threading.Lock()}


@pytest.mark.parametrize("backend", [ce.Local(workers=1), ce.Loopback(nodes=1)], ids=["local", "network"])
def test_infos_of_many_episodes_that_are_left_out_are_one_event(backend):
    """Else one evaluation would replace the whole log, which keeps a thousand events."""
    result, events = evaluate(lambda: Several(threading.Lock), backend, episodes=40)
    assert len(result.infos) == 40 and len(events) == 1
    assert all(events[0].reason.count(f"info['{key}']") == 1 for key in ("odd", "even", "extra"))


def test_an_event_names_some_of_many_infos():
    result, events = evaluate(lambda: Goal(lambda: np.zeros(20 << 20, np.uint8)), ce.Loopback(nodes=1), episodes=14)
    assert len(result.infos) == 14 and len(events) == 1
    assert events[0].reason.count("bytes") == 8 and events[0].reason.endswith("; and 6 more")


def test_infos_are_checked_before_they_are_sent():
    played = [PlayedEpisode(i, 0.0, 1, None, {"a": i, "b": object(), "c": "x" * 100}) for i in range(3)]
    one, two, three = with_plain_ends(played, "refuse", 300)
    assert one.info == {"a": 0, "c": "x" * 100} and "info['b']" in one.not_sent
    assert two.info == {"a": 1, "c": "x" * 100}
    assert three.info == {} and "the info of episode 2 takes" in three.not_sent
    (shown,) = with_plain_ends(played[:1], "repr", 1000)
    assert shown.info["b"] is played[0].info["b"] and not shown.not_sent, "its repr is sent"


@pytest.mark.parametrize(
    ("infos", "rate"),
    [
        ([{}, {"other": 1}], None),
        ([{"is_success": True}, {"is_success": False}], 0.5),
        ([{"is_success": np.array([True])}, {}, {"success": np.float32(0.5)}, {"success": 0}], 0.375),
        ([{"success": "yes"}, {"success": [[1], [2, 3]]}, {"success": None}, {"success": 2**70}], None),
        ([], None),
    ],
    ids=str,
)
def test_the_success_rate_is_the_mean_of_what_the_infos_report(infos, rate):
    assert ce.Evaluation(np.zeros(2), np.ones(2), np.arange(2), [], infos).success_rate == rate


class OddInfos(SyncVectorEnv):
    """Adds these infos to those of each step."""

    def __init__(self, num_envs, mode, infos):
        super().__init__([Goal] * num_envs, autoreset_mode=mode)
        self.more = infos

    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, {**infos, **self.more(self.num_envs)}


ODD = {
    "scalar": (lambda n: {"fps": 30.0}, {"fps": 30.0}),
    "text": (lambda n: {"phase": "r" * n}, {"phase": "rr"}),
    "empty": (lambda n: {"stats": np.zeros(0)}, {"stats": np.zeros(0)}),
    "longer": (lambda n: {"stats": np.arange(n + 1)}, {"stats": np.arange(3)}),
    "no axis": (lambda n: {"stats": np.array(2.0)}, {"stats": np.array(2.0)}),
    "int key": (lambda n: {0: np.ones(n)}, {0: np.float64(1)}),
    "list": (lambda n: {"names": ["a"] * n}, {"names": "a"}),
    "nested": (lambda n: {"run": {"lr": 0.1, "x": np.ones(n)}}, {"run": {"lr": 0.1, "x": np.float64(1)}}),
    "masked": (lambda n: {"x": np.ones(n), "_x": np.zeros(n, bool)}, {}),
    "odd mask": (lambda n: {"x": np.ones(n), "_x": 1}, {"x": np.float64(1)}),
    "none": (lambda n: {"x": None}, {"x": None}),
}


@pytest.mark.parametrize("name", ODD)
def test_a_vector_environment_may_report_any_infos(name):
    """What has no row for each environment belongs to all of them."""
    infos, expected = ODD[name]

    def make(num_envs, seeds):
        return OddInfos(num_envs, AutoresetMode.NEXT_STEP, infos)

    with ce.ClusterEnv(ce.Vector(make), 2, backend=ce.Local(workers=0)) as envs:
        result = envs.collector(ce.RandomPolicy(), seed=1).evaluate(episodes=2, deterministic=False)
    for info, length in zip(result.infos, result.lengths.tolist(), strict=True):
        own = {key: info.pop(key) for key in ("t", "is_success")}
        assert own == {"t": length, "is_success": length % 2 == 0}
        same(info, expected)


@pytest.mark.parametrize("name", ODD)
def test_steps_and_rollouts_take_any_infos_of_a_vector_environment(name):
    infos, expected = ODD[name]

    def make(num_envs, seeds):
        return OddInfos(num_envs, AutoresetMode.NEXT_STEP, infos)

    with ce.ClusterEnv(ce.Vector(make), 2, backend=ce.Local(workers=1)) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1, info_keys=["t"]).rollout(40)
        assert batch.valid.all() and len(batch.episodes.returns) > 0
        envs.reset(seed=1)
        *_, stepped = envs.step(np.zeros(2, np.int64))
        assert not {"worker_lost", "env_error"} & set(envs.stats()["events"])
    for key, value in expected.items():
        if not isinstance(value, dict):
            assert np.array_equal(np.asarray(stepped[key][0]), np.asarray(value))


@pytest.mark.parametrize("kind", [list, lambda infos: np.array(infos, dtype=object)], ids=["list", "array"])
def test_last_infos_may_be_one_dict_for_each_environment(kind):
    class PerEnv(SyncVectorEnv):
        def step(self, actions):
            *rest, ends, cuts, infos = super().step(actions)
            if "final_info" in infos:
                final = [{"is_success": True, "t": self.envs[k].t} if ends[k] else None for k in range(self.num_envs)]
                infos = {**infos, "final_info": kind(final)}
            return *rest, ends, cuts, infos

    def make(num_envs, seeds):
        return PerEnv([Goal] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    with ce.ClusterEnv(ce.Vector(make), 2, backend=ce.Local(workers=0)) as envs:
        result = envs.collector(ce.RandomPolicy(), seed=1).evaluate(episodes=5, deterministic=False)
    assert all(set(info) == {"is_success", "t"} for info in result.infos) and result.success_rate == 1.0


def test_frames_of_a_vector_environment_travel():
    def make(num_envs, seeds):
        return SyncVectorEnv([Goal] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    result, _ = evaluate(ce.Vector(make), ce.Loopback(nodes=1), episodes=3, record=2)
    assert [len(frames) for frames in result.frames] == result.lengths[:2].tolist()
    assert len(result.infos) == 3 and all(result.infos)
