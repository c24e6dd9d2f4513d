"""One suite over every way to run: what a user may rely on does not depend on where the environments are."""

from __future__ import annotations

import os
import signal
import sys
import time

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv as ce
import real
from clusterenv.policy.weights import encoding
from namespace_cluster import ByHand, pods
from netns import Network
from policies import net, nudge
from toys import SpaceEnv, Trouble, linear, same

ID = "CartPole-v1"


@pytest.fixture(
    params=[
        pytest.param("local", marks=pytest.mark.network),
        pytest.param("network", marks=pytest.mark.network),
        pytest.param("manual", marks=pytest.mark.network),
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("ray", marks=pytest.mark.ray),
        pytest.param("kubernetes", marks=pytest.mark.kubernetes),
    ]
)
def backend(request, tmp_path):
    if request.param == "local":
        yield ce.Local(workers=2)
    elif request.param == "network":
        yield ce.Loopback(nodes=2)
    elif request.param == "slurm":
        yield ce.Slurm(nodes=2, interface="lo", folder=str(tmp_path / "keys"), extra={"exclusive": None})
    elif request.param == "ray":
        yield ce.Ray(nodes=2, bind="lo")
    elif request.param == "kubernetes":
        yield pods(real.running["kubernetes"])
    else:
        with Network(nodes=2) as net:
            yield ByHand(net, tmp_path / "keys")


SPACES = {
    "box": (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)),
    "nested": (
        spaces.Dict({"image": spaces.Box(0, 255, (4, 4, 1), np.uint8), "pair": spaces.Tuple([spaces.Discrete(4)] * 2)}),
        spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.MultiDiscrete([2, 3])}),
    ),
    "objects": (
        spaces.Dict({"text": spaces.Text(5), "bits": spaces.MultiBinary(3)}),
        spaces.Sequence(spaces.Discrete(3)),
    ),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("box", AutoresetMode.NEXT_STEP), ("nested", AutoresetMode.SAME_STEP), ("objects", AutoresetMode.DISABLED)],
)
def test_step_equals_sync_vector_env(backend, kind, mode):
    obs_space, action_space = SPACES[kind]

    def thunk(i):
        return lambda: SpaceEnv(obs_space, action_space, length=3 + i, info="rich", truncates=i % 2 == 1)

    theirs = SyncVectorEnv([thunk(i) for i in range(4)], autoreset_mode=mode)
    with ce.ClusterEnv([thunk(i) for i in range(4)], backend=backend, autoreset_mode=mode) as ours:
        assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
        same(ours.reset(seed=7), theirs.reset(seed=7))
        theirs.action_space.seed(3)
        for t in range(12):
            actions = theirs.action_space.sample()
            a, b = ours.step(actions), theirs.step(actions)
            same(a, b, f"step {t}")
            if mode is AutoresetMode.DISABLED and (done := b[2] | b[3]).any():
                same(*(e.reset(options={"reset_mask": done.copy()}) for e in (ours, theirs)))
        assert ours.call("add", 1, y=2) == theirs.call("add", 1, y=2)
        ours.set_attr("bonus", [1.0, 2.0, 3.0, 4.0])
        assert ours.get_attr("bonus") == (1.0, 2.0, 3.0, 4.0)
        for ours_frame, their_frame in zip(ours.render(), theirs.render(), strict=True):
            assert np.array_equal(ours_frame, their_frame)
    theirs.close()


def test_partial_batches(backend):
    with ce.ClusterEnv(ID, 4, backend=backend) as envs:
        envs.reset(seed=1)
        envs.send(np.array([1, 0]), slots=[2, 0])
        obs, rewards, _, _, infos = envs.recv()
        assert infos["slot"].tolist() == [0, 2] and rewards.tolist() == [1.0, 1.0] and obs.shape == (2, 4)
        envs.send(np.array([0, 0]), slots=[1, 3])
        assert envs.recv(min_envs=2)[4]["slot"].tolist() == [1, 3]


def numpy_policy():
    """Workers that act with it need not import torch first."""
    return ce.NumpyPolicy(linear, {"w": np.ones((4, 2), np.float32)}, dist="categorical")


def collected(backend, updates=8):
    module = net(2, 4)
    generator = torch.Generator().manual_seed(3)
    policy = ce.TorchPolicy(module, dist="categorical")
    with ce.ClusterEnv(ID, 8, backend=backend) as envs:
        collector = envs.collector(policy, seed=5, sync=ce.APS(threshold=0.002), codec="fp32")
        batches = []
        for _ in range(updates):
            batches.append(collector.rollout(16))
            nudge(module, 0.03, generator)
        evaluation = collector.evaluate(episodes=6, seed=3)
        return batches, evaluation, collector.stats(), len(encoding.encode(policy.weights()))


def test_rollouts_pulls_and_bytes_are_those_of_one_process(backend):
    expected, played, reference, _ = collected(ce.Local(workers=0))
    batches, evaluation, stats, size = collected(backend)
    for a, b in zip(expected, batches, strict=True):
        for name in ("obs", "actions", "rewards", "logprobs", "versions", "valid", "last_obs", "final_obs"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert a.episodes.returns.tolist() == b.episodes.returns.tolist()
    assert evaluation.returns.tolist() == played.returns.tolist()
    nodes = len(stats["nodes"])
    assert 1 < reference["pulls"] < 8
    assert stats["pulls"] == nodes * reference["pulls"], "all nodes have the same version, so all pull"
    assert stats["weight_bytes"] == stats["pulls"] * size
    assert stats["fragment_bytes"] == reference["fragment_bytes"] and stats["drift_bytes"] == reference["drift_bytes"]


def test_stream_delivers_each_fragment_once_and_in_order(backend):
    weights = {"w": np.ones((4, 2), np.float32)}
    policy = ce.NumpyPolicy(linear, weights, dist="categorical")
    with ce.ClusterEnv(ID, 8, backend=backend) as envs:
        collector = envs.collector(policy, seed=5)
        last = {}
        for i, batch in enumerate(collector.stream(8)):
            for slot, sequence in zip(batch.slots.tolist(), batch.sequence.tolist(), strict=True):
                assert sequence == last.get(slot, -1) + 1
                last[slot] = sequence
            weights["w"] *= 1.01
            collector.publish()
            if i >= 30 and len(last) == 8:  # a node may be late: its workers import torch first
                break
        assert collector.rollout(4).valid.all() and envs.step(np.zeros(8, dtype=np.int64))[0].shape == (8, 4)


def test_step_with_an_agent(backend):
    with ce.ClusterEnv(ID, 4, backend=backend) as envs:
        envs.reset(seed=1)
        agent = numpy_policy()
        for _ in range(3):
            obs, _, _, _, infos = envs.step(agent)
        assert obs.shape == (4, 4) and infos["action"].shape == (4,) and (infos["logprob"] < 0).all()


class Plain(gym.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "list": [1, "a", None, {"x": (1, 2)}], "f": np.float32(2.5)}


def test_plain_infos_survive(backend):
    with ce.ClusterEnv([lambda: Plain(gym.make(ID))] * 2, backend=backend) as envs:
        envs.reset(seed=1)
        infos = envs.step(np.zeros(2, dtype=np.int64))[4]
        assert infos["list"][1] == [1, "a", None, {"x": (1, 2)}] and infos["f"].dtype == np.float32


@pytest.mark.guarantee(10)
def test_an_error_brings_its_traceback(backend):
    with ce.ClusterEnv([lambda: Trouble(0, "raise", at=1)] * 2, backend=backend) as envs:
        envs.reset(seed=1)
        with pytest.raises(ce.EnvError, match="ZeroDivisionError: simulator exploded") as caught:
            envs.step(np.zeros(2, dtype=np.int64))
        assert "in _fail" in caught.value.remote_traceback


def test_code_that_does_not_load_is_named(backend):
    def broken():
        raise OSError("no simulator licence")

    with pytest.raises(ce.EnvError, match="no simulator licence"):
        ce.ClusterEnv([broken] * 2, backend=backend)


@pytest.mark.parametrize("what", ["kill", "raise", "segfault"])
def test_a_fault_costs_an_episode(backend, tmp_path, what):
    memory = str(tmp_path / "lives")
    thunks = [lambda i=i: Trouble(i, what if i == 1 else None, memory=memory, length=100) for i in range(4)]
    with ce.ClusterEnv(thunks, backend=backend, recovery=ce.Recovery(backoff_s=(0.05, 0.1))) as envs:
        envs.reset(seed=1)
        lost = []
        for _ in range(8):
            _, rewards, terminations, truncations, infos = envs.step(np.zeros(4, dtype=np.int64))
            assert not terminations.any()
            if "transition_valid" in infos:
                lost.append(np.flatnonzero(~infos["transition_valid"]).tolist())
                assert rewards[lost[-1]].sum() == 0 and truncations[lost[-1]].all()
        assert lost == [[1] if what == "raise" else [0, 1]]


def kill_worker(backend, pid):
    if isinstance(backend, ce.Kubernetes):  # its numbers are those of the pod's own processes
        kubectl = real.running["kubernetes"].kubectl
        name = kubectl("get", "pods", "-l", "clusterenv/node=0", "-o", "name").strip()
        kubectl("exec", name, "--", sys.executable, "-c", f"import os; os.kill({pid}, 9)")
    else:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.guarantee(1)
def test_a_killed_worker_runs_its_fragment_again(backend):
    with ce.ClusterEnv(ID, 4, backend=backend, recovery=ce.Recovery(backoff_s=(0.05, 0.1))) as envs:
        collector = envs.collector(numpy_policy(), seed=1)
        collector.rollout(8)
        deadline = time.monotonic() + 20
        while (pid := envs.stats()["worker_pids"][0]) is None and time.monotonic() < deadline:
            collector.rollout(8)
            time.sleep(0.1)
        kill_worker(backend, pid)
        batch = collector.rollout(8)
        batch = collector.rollout(8)
        assert batch.valid.all() and batch.incarnations.tolist() == [1, 1, 0, 0]


def children():
    return {c.pid for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.guarantee(15, 16)
def test_close_is_bounded_and_leaves_nothing(backend, record_property):
    before = children()
    envs = ce.ClusterEnv([lambda: Trouble(0, "hang", at=2)] * 2, backend=backend)
    envs.reset(seed=1)
    envs.step(np.zeros(2, dtype=np.int64))
    envs.send(np.zeros(2, dtype=np.int64))
    start = time.monotonic()
    envs.close()
    seconds = time.monotonic() - start
    record_property("closed_s", seconds)
    assert seconds < 10
    envs.close()
    deadline = time.monotonic() + 3  # agents that somebody started by hand end by themselves
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children() - before
