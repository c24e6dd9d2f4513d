"""Tests, for pytest, that every backend over a network must pass.

A package that ships a backend runs them by deriving from `BackendContract` in a test module:

    class TestSsh(BackendContract):
        def make_backend(self, folder, **options):
            return Ssh(hosts=("n1", "n2"), folder=folder, **options)

The environments themselves kill nodes and workers, so these may be on any machine. Nodes need only this package, not
the tests.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import SyncVectorEnv

import clusterenv as ce
from clusterenv.backends import registry
from clusterenv.backends.cluster import example_plan
from clusterenv.backends.contract import ClusterBackend, CollectsGarbage, PrintsScript
from clusterenv.backends.gc import remove
from clusterenv.backends.remote import Remote
from clusterenv.system.identity import machine
from clusterenv.testing.envs import KILL_NODE, KILL_WORKER, Fragile, linear
from clusterenv.testing.running import (
    WAIT_S,
    Place,
    actions,
    agent,
    is_running,
    kinds,
    places,
    run_head,
    start,
    step_until,
    wait_for,
)

_CLOSE_S = 10.0

_HEARTBEAT_S = (0.2, 2.0, 5.0)  # short, so that tests do not wait long for the end of a lease

_ENDS_S = _HEARTBEAT_S[2] + 15.0  # after this time nothing runs without its head

_FIRST_S = 30.0  # for the first fragment of a node that has joined; 5 s on a machine with nothing else to do

_SLOW = functools.partial(Fragile, step_s=0.02)

Record = Callable[[str, object], None]
"""pytest's `record_property`: what the tests measure is in its reports."""


class BackendContract:
    """Tests of a backend: derive from this class, and define `make_backend`."""

    nodes: ClassVar[int] = 2
    num_envs: ClassVar[int] = 4
    max_nodes: ClassVar[int | None] = 3
    """Number of nodes to scale a run to; None: there is no room for more than `nodes`, and scaling is not tested."""

    def make_backend(self, folder: Path, **options: Any) -> Remote:
        """Return the backend.

        `folder`: for key files; nodes must be able to read it. `options`: any of `nodes`, `max_nodes`, `heartbeat_s`,
        `start_timeout_s` and `advertise`.
        """
        raise NotImplementedError

    def kill_node(self, envs: ce.ClusterEnv, slot: int) -> float:
        """Kill the node of this slot without warning; return the `time.time()` of that.

        Override this if the agent is process 1, as in a pod.
        """
        killed_at = time.time()
        envs.step(actions(envs, slot, KILL_NODE))
        return killed_at

    def ask_to_leave(self, envs: ce.ClusterEnv, slot: int, after_s: float) -> None:
        """Return at once; ask the node of this slot to leave `after_s` later. Default: its agent gets SIGTERM.

        Override this with what the scheduler does to a job that it ends before its time, in a `threading.Timer`.
        """
        envs.call("ask_to_leave", after_s, slots=[slot])

    def left_behind(self) -> Sequence[str]:
        """Return the jobs and objects that the scheduler still has of any run. Default: only processes are checked."""
        return ()

    def running(self) -> Sequence[str]:
        """Return those that run. Override this if some remain after their agents ended by themselves, as pods do."""
        return self.left_behind()

    # -- inside -----------------------------------------------------------------------------------------------

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        path = tmp_path / "keys"
        path.mkdir()
        return path

    def _backend(self, folder: Path, **options: Any) -> Remote:
        return self.make_backend(folder, **{"nodes": self.nodes, "heartbeat_s": _HEARTBEAT_S, **options})

    def _make(self, folder: Path, env: Callable[[], Fragile] = Fragile, **options: Any) -> ce.ClusterEnv:
        return self._run(self._backend(folder, **options), env)

    def _run(self, backend: Remote, env: Callable[[], Fragile]) -> ce.ClusterEnv:
        recovery = ce.Recovery(backoff_s=(0.05, 0.5), max_restarts=20)
        return ce.ClusterEnv([env] * self.num_envs, backend=backend, recovery=recovery)

    def _await_end(self, those: Sequence[Place]) -> None:
        """Wait for the end of the processes at these places, and of the scheduler's jobs."""
        here = {place[name] for place in those for name in ("worker", "agent") if place["where"] == machine()}
        wait_for(
            lambda: not [pid for pid in here if is_running(pid)], f"of the processes {here} some are still running"
        )
        wait_for(lambda: not self.running(), "jobs are still running", self.running)

    def _await_nothing(self, folder: Path, those: Sequence[Place] = ()) -> None:
        """Wait until the scheduler has nothing of the run either; then no run folder may be left."""
        self._await_end(those)
        wait_for(lambda: not self.left_behind(), "the scheduler still has jobs", self.left_behind)
        assert not list(folder.glob("clusterenv-*")), "the folder of the run is still there"

    def _collect_garbage(self, folder: Path, those: Sequence[Place]) -> None:
        assert list(folder.glob("clusterenv-*")), "the run has no folder below the one that make_backend() was given"
        said: list[str] = []
        assert remove([folder], False, said.append) == (1, 0), f"`clusterenv gc` says: {said}"
        self._await_nothing(folder, those)

    # -- the contract -----------------------------------------------------------------------------------------

    def test_it_is_a_backend(self, folder: Path) -> None:
        backend = self._backend(folder)
        assert isinstance(backend, ClusterBackend), "it lacks a part of contract.ClusterBackend"
        assert backend.nodes == self.nodes, "make_backend() did not pass on nodes=..."
        if isinstance(backend, CollectsGarbage):
            found = registry.find(backend.name)
            assert isinstance(backend, found), f"the entry point {backend.name!r} is of another class, {found}"

    def test_every_node_runs_its_share(self, folder: Path) -> None:
        with self._make(folder) as envs:
            number = _number(envs.call("place"))
            assert number == self.nodes, f"{number} node agents have environments, not {self.nodes}"
            assert not envs.stats()["missing_nodes"]

    def test_step_equals_sync_vector_env(self, folder: Path) -> None:
        theirs = SyncVectorEnv([_cart_pole for _ in range(self.num_envs)])
        with ce.ClusterEnv("CartPole-v1", self.num_envs, backend=self._backend(folder)) as ours:
            _check_same(ours.reset(seed=7), theirs.reset(seed=7))
            theirs.action_space.seed(3)
            for _ in range(60):
                actions = theirs.action_space.sample()
                _check_same(ours.step(actions), theirs.step(actions))
        theirs.close()

    def test_rollout_equals_that_of_one_process(self, folder: Path) -> None:
        policy = _policy(np.ones((4, 2)), [0.0, 0.0])
        batches = []
        for backend in (self._backend(folder), ce.Local(workers=0)):
            with ce.ClusterEnv("CartPole-v1", self.num_envs, backend=backend) as envs:
                batches.append(envs.collector(policy, seed=5).rollout(40))
        ours, theirs = batches
        assert ours.valid.all()
        for name in ("obs", "actions", "rewards", "terminations", "truncations"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), f"{name} differ"

    def test_a_killed_worker_is_replaced(self, folder: Path, record_property: Record) -> None:
        with self._make(folder) as envs:
            before = start(envs)
            on_it = np.array([place == before[0] for place in before])
            begin = time.monotonic()
            obs, rewards, terminations, truncations, infos = envs.step(actions(envs, 0, KILL_WORKER))
            record_property("detected_s", time.monotonic() - begin)
            record_property("lost_steps", int((~infos["transition_valid"]).sum()))
            assert np.array_equal(infos["transition_valid"], ~on_it), "only the rows of the killed worker are invalid"
            assert truncations[on_it].all() and not terminations.any() and not rewards[on_it].any()
            assert (obs[~on_it] == 2).all(), "the environments of other workers went on"
            assert "SIGKILL" in infos["loss_reason"][0], f"the reason lacks the signal: {infos['loss_reason'][0]}"
            step_until(envs, lambda: all(place != before[0] for place in places(envs) or before))
            assert "node_lost" not in kinds(envs), "a worker was killed, not a node"

    def test_a_killed_node_is_replaced(self, folder: Path, record_property: Record) -> None:
        with self._make(folder) as envs:
            before = start(envs)
            agents = list(map(agent, before))
            killed_at = self.kill_node(envs, 0)
            lost = step_until(envs, lambda: kinds(envs).count("node_joined") == self.nodes + 1)
            on_it = {slot for slot, its in enumerate(agents) if its == agents[0]}
            assert "node_lost" in kinds(envs) and lost <= on_it, f"slots {lost} were lost, the node had {on_it}"
            record_property("detected_s", _time_of(envs, "node_lost") - killed_at)
            after: Sequence[Place] = ()

            def is_whole() -> bool:
                nonlocal after
                after = places(envs)
                return bool(after) and not envs.stats()["missing_nodes"]

            step_until(envs, is_whole)
            record_property("lost_steps", int(envs.stats()["incarnations"].sum()))  # each began with a step lost
            assert agents[0] not in map(agent, after), "the old node is still there"
            assert "transition_valid" not in envs.step(actions(envs))[4], "all environments run again"
        self._await_nothing(folder, [*before, *after])

    def test_a_node_that_is_asked_to_leave(self, folder: Path, record_property: Record) -> None:
        """It delivers the steps that it has finished, says why it leaves, and is replaced."""
        with self._make(folder, _SLOW) as envs:
            collector = envs.collector(_steady(), info_keys=("at",), seed=1)
            collector.rollout(2)
            before = envs.call("place")
            others = [slot for slot, place in enumerate(before) if agent(place) != agent(before[0])]
            self.ask_to_leave(envs, 0, 1.0)
            asked_at, deadline = time.time() + 1.0, time.monotonic() + WAIT_S
            while "node_lost" not in kinds(envs):
                assert time.monotonic() < deadline, f"the node did not leave within {WAIT_S:.0f} s: {envs.events()}"
                batch = collector.rollout(100)
            assert batch.valid[:, others].all(), "the rows of other nodes"
            rows = batch.valid[:, 0]
            assert rows.any() and rows[: rows.sum()].all(), f"its first steps, and not {np.flatnonzero(rows)}"
            record_property("lost_steps", _count_lost(batch.infos["at"][rows, 0], asked_at))
            reason = next(event.reason for event in envs.events() if event.kind == "node_lost")
            assert "preempted" in reason, f"the reason is {reason!r}"
            assert collector.rollout(8).valid.all(), "all environments run again"
            assert kinds(envs).count("node_joined") == self.nodes + 1 and not envs.stats()["missing_nodes"]
            after = envs.call("place")
        self._await_nothing(folder, [*before, *after])

    def test_a_node_that_joins_late(self, folder: Path, record_property: Record) -> None:
        """It collects soon after it has joined, with the weights that were current then."""
        backend = dataclasses.replace(self._backend(folder), move_after_s=None)  # its slots wait for it
        with self._run(backend, _SLOW) as envs:
            policy = _steady()
            collector = envs.collector(policy, seed=1)
            collector.rollout(2)
            self.kill_node(envs, 0)
            versions = [(time.time(), collector.publish())]
            stream, deadline = collector.stream(8), time.monotonic() + WAIT_S
            for batch in stream:
                if (batch.incarnations[batch.slots == 0] > 0).any():
                    break
                assert time.monotonic() < deadline, f"it did not join within {WAIT_S:.0f} s; events: {envs.events()}"
                policy.values["b"][0] += 1.0
                versions.append((time.time(), collector.publish()))
            joined_at = _time_of(envs, "node_joined")
            first_s = time.time() - joined_at
            stream.close()
            assert kinds(envs).count("node_joined") == self.nodes + 1
            current = [version for published_at, version in versions if published_at <= joined_at]
            assert batch.versions.min() >= max(current, default=0), "the weights are older than the node"
            record_property("first_s", first_s)
            assert first_s < _FIRST_S, f"its first fragment came {first_s:.1f} s after it had joined"

    def test_scale(self, folder: Path) -> None:
        if self.max_nodes is None:
            pytest.skip("no room for more nodes")
        with self._make(folder, max_nodes=self.max_nodes) as envs:
            start(envs)
            envs.scale(self.max_nodes)
            step_until(envs, lambda: _number(places(envs)) == self.max_nodes)
            envs.scale(self.nodes)
            step_until(envs, lambda: _number(places(envs)) == self.nodes)
            step_until(envs, lambda: "node_left" in kinds(envs))
            assert "node_lost" not in kinds(envs), envs.events()
            after = places(envs)
        self._await_nothing(folder, after)

    def test_close_is_bounded_and_leaves_nothing(self, folder: Path, record_property: Record) -> None:
        envs = self._make(folder)
        before = start(envs)
        begin = time.monotonic()
        envs.close()
        seconds = time.monotonic() - begin
        record_property("closed_s", seconds)
        assert seconds < _CLOSE_S + 2.0, f"close() took {seconds:.1f} s"
        self._await_nothing(folder, before)

    @pytest.mark.parametrize("times", [1, 2])
    def test_ctrl_c_leaves_nothing(self, folder: Path, tmp_path: Path, times: int, record_property: Record) -> None:
        """In a terminal: all processes of the script's group get the signal, a second time while it closes."""
        with run_head(self._backend(folder), self.num_envs, tmp_path) as head:
            begin = time.monotonic()
            for _ in range(times):
                if head.process.poll() is None:
                    os.killpg(head.process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    head.process.wait(0.05)
            head.process.wait(WAIT_S)
            seconds = time.monotonic() - begin
        record_property("closed_s", seconds)
        text = head.log.read_text()
        assert "KeyboardInterrupt" in text, f"the script says: {text}"
        assert seconds < _CLOSE_S + 2.0, f"the script ended {seconds:.1f} s after Ctrl-C, and says: {text}"
        self._await_nothing(folder, head.places)

    def test_gc_removes_what_a_killed_head_left(self, folder: Path, tmp_path: Path) -> None:
        with run_head(self._backend(folder), self.num_envs, tmp_path) as head:
            head.process.kill()
        self._collect_garbage(folder, head.places)

    def test_nothing_runs_after_its_head_was_killed(
        self, folder: Path, tmp_path: Path, record_property: Record
    ) -> None:
        """Node agents end by themselves with their lease, and `clusterenv gc` removes the rest."""
        with run_head(self._backend(folder), self.num_envs, tmp_path) as head:
            head.process.kill()
            begin = time.monotonic()
        self._await_end(head.places)
        seconds = time.monotonic() - begin
        record_property("gone_s", seconds)
        assert seconds < _ENDS_S, f"the last one ended {seconds:.1f} s after its head"
        self._collect_garbage(folder, head.places)

    def test_nodes_that_never_join(self, folder: Path) -> None:
        """Nodes that dial an address where nothing listens raise an error that names them, and leave nothing behind."""
        backend = self._backend(folder, start_timeout_s=8.0, advertise="127.0.0.1:9")
        begin = time.monotonic()
        with pytest.raises(ce.StartError, match="node 0"):
            ce.ClusterEnv([Fragile] * self.num_envs, backend=backend)
        seconds = time.monotonic() - begin
        assert seconds < backend.start_timeout_s + 30.0, f"it took {seconds:.0f} s to notice"
        self._await_nothing(folder)

    def test_script(self, folder: Path) -> None:
        backend = self._backend(folder)
        if not isinstance(backend, PrintsScript):
            pytest.skip("this backend submits no text")
        plan = example_plan(backend)
        text = backend.script(plan)
        assert text.strip() and text == backend.script(plan), "the same plan has the same script"
        assert "clusterenv" in text and "node" in text, "the script starts no node agent"
        assert not plan.folder.exists(), "script() is pure: it makes no folder"


# -- helpers ------------------------------------------------------------------------------------------------------


def _cart_pole() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


def _policy(w: Any, b: Any) -> ce.NumpyPolicy:
    return ce.NumpyPolicy(linear, {"w": np.array(w, np.float32), "b": np.array(b, np.float32)}, dist="categorical")


def _steady() -> ce.NumpyPolicy:
    """Return a policy for `Fragile` that kills nothing."""
    return _policy(np.zeros((1, 3)), [100.0, -100.0, -100.0])


def _number(those: Sequence[Place]) -> int:
    """Return the number of node agents at these places."""
    return len(set(map(agent, those)))


def _time_of(envs: ce.ClusterEnv, kind: str) -> float:
    """Return when the last event of this kind was recorded."""
    return [event.time_s for event in envs.events() if event.kind == kind][-1]


def _count_lost(at: Any, asked_at: float) -> int:
    """Return how many steps, of which those that ended `at` were delivered, had ended when the node was asked to leave.

    The clocks of nodes may differ from this one: it is recorded, and not asserted.
    """
    return max(0, int((asked_at - at[-1]) / np.median(np.diff(at)))) if len(at) > 1 else 0


def _check_same(ours: Any, theirs: Any) -> None:
    assert data_equivalence(ours, theirs, exact=True), f"{ours} in place of {theirs}"
