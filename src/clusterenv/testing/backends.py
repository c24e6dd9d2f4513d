"""Tests, for pytest, that every backend over a network must pass.

A package that ships a backend runs them by deriving from `BackendContract` in a test module:

    class TestSsh(BackendContract):
        def make_backend(self, folder, **options):
            return Ssh(hosts=("n1", "n2"), folder=folder, **options)

The environments themselves kill nodes and workers, so these may be on any machine. Nodes need only this package, not
the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import SyncVectorEnv

import clusterenv as ce
from clusterenv.backends import registry
from clusterenv.backends.cluster import example_plan
from clusterenv.backends.contract import ClusterBackend, CollectsGarbage, PrintsScript
from clusterenv.backends.gc import remove
from clusterenv.backends.launch.note import machine
from clusterenv.backends.remote import Remote
from clusterenv.testing.envs import KILL_NODE, KILL_WORKER, STEP, Fragile

_WAIT_S = 90.0  # for a node to be replaced or to end; a slow scheduler must not fail the tests

_CLOSE_S = 10.0

_HEARTBEAT_S = (0.2, 2.0, 5.0)  # short, so that tests do not wait long for the end of a lease

_HEAD = """
import json, sys
import cloudpickle
import clusterenv as ce
from clusterenv.testing.envs import Fragile

with open(sys.argv[1], "rb") as file:
    backend, num_envs = cloudpickle.load(file)
envs = ce.ClusterEnv([Fragile] * num_envs, backend=backend)
envs.reset(seed=1)
print(json.dumps(envs.call("place")), flush=True)
sys.stdin.read()
"""


def _forward(weights: Any, obs: Any) -> Any:
    return obs @ weights["w"]


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

    def kill_node(self, envs: ce.ClusterEnv, slot: int) -> None:
        """Kill the node of this slot without warning. Override this if the agent is process 1, as in a pod."""
        envs.step(_actions(envs, slot, KILL_NODE))

    def left_behind(self) -> Sequence[str]:
        """Return the jobs and objects that the scheduler still has of any run. Default: only processes are checked."""
        return ()

    # -- inside -----------------------------------------------------------------------------------------------

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        path = tmp_path / "keys"
        path.mkdir()
        return path

    def _backend(self, folder: Path, **options: Any) -> Remote:
        return self.make_backend(folder, **{"nodes": self.nodes, "heartbeat_s": _HEARTBEAT_S, **options})

    def _make(self, folder: Path, **options: Any) -> ce.ClusterEnv:
        recovery = ce.Recovery(backoff_s=(0.05, 0.5), max_restarts=20)
        return ce.ClusterEnv([Fragile] * self.num_envs, backend=self._backend(folder, **options), recovery=recovery)

    def _await_nothing(self, folder: Path, places: Sequence[dict[str, Any]] = ()) -> None:
        """Wait for the end of these processes and of the scheduler's jobs; then no run folder may be left."""
        here = {place[name] for place in places for name in ("worker", "agent") if place["where"] == machine()}
        _await(lambda: not [pid for pid in here if _is_running(pid)], f"of the processes {here} some are still running")
        _await(lambda: not self.left_behind(), "the scheduler still has jobs", lambda: self.left_behind())
        assert not list(folder.glob("clusterenv-*")), "the folder of the run is still there"

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
            places = envs.call("place")
            number = len(_agents(places))
            assert number == self.nodes, f"{number} node agents have environments, not {self.nodes}"
            assert not envs.stats()["missing_nodes"]

    def test_step_equals_sync_vector_env(self, folder: Path) -> None:
        theirs = SyncVectorEnv([_cart_pole for _ in range(self.num_envs)])
        with ce.ClusterEnv("CartPole-v1", self.num_envs, backend=self._backend(folder)) as ours:
            _same(ours.reset(seed=7), theirs.reset(seed=7))
            theirs.action_space.seed(3)
            for _ in range(60):
                actions = theirs.action_space.sample()
                _same(ours.step(actions), theirs.step(actions))
        theirs.close()

    def test_rollout_equals_that_of_one_process(self, folder: Path) -> None:
        policy = ce.NumpyPolicy(_forward, {"w": np.ones((4, 2), np.float32)}, dist="categorical")
        batches = []
        for backend in (self._backend(folder), ce.Local(workers=0)):
            with ce.ClusterEnv("CartPole-v1", self.num_envs, backend=backend) as envs:
                batches.append(envs.collector(policy, seed=5).rollout(40))
        ours, theirs = batches
        assert ours.valid.all()
        for name in ("obs", "actions", "rewards", "terminations", "truncations"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), f"{name} differ"

    def test_a_killed_worker_is_replaced(self, folder: Path) -> None:
        with self._make(folder) as envs:
            before = _start(envs)
            on_it = np.array([place == before[0] for place in before])
            obs, rewards, terminations, truncations, infos = envs.step(_actions(envs, 0, KILL_WORKER))
            assert np.array_equal(infos["transition_valid"], ~on_it), "only the rows of the killed worker are invalid"
            assert truncations[on_it].all() and not terminations.any() and not rewards[on_it].any()
            assert (obs[~on_it] == 2).all(), "the environments of other workers went on"
            _step_until(envs, lambda: all(place != before[0] for place in _places(envs) or before))
            assert "node_lost" not in _kinds(envs), "a worker was killed, not a node"

    def test_a_killed_node_is_replaced(self, folder: Path) -> None:
        with self._make(folder) as envs:
            before = _start(envs)
            agents = [(place["where"], place["agent"], place["began"]) for place in before]
            self.kill_node(envs, 0)
            lost = _step_until(envs, lambda: _kinds(envs).count("node_joined") == self.nodes + 1)
            on_it = {slot for slot, agent in enumerate(agents) if agent == agents[0]}
            assert "node_lost" in _kinds(envs) and lost <= on_it, f"slots {lost} were lost, the node had {on_it}"
            after: Sequence[dict[str, Any]] = ()

            def is_whole() -> bool:
                nonlocal after
                after = _places(envs)
                return bool(after) and not envs.stats()["missing_nodes"]

            _step_until(envs, is_whole)
            assert agents[0] not in _agents(after), "the old node is still there"
            assert "transition_valid" not in envs.step(_actions(envs))[4], "all environments run again"
        self._await_nothing(folder, [*before, *after])

    def test_scale(self, folder: Path) -> None:
        if self.max_nodes is None:
            pytest.skip("no room for more nodes")
        with self._make(folder, max_nodes=self.max_nodes) as envs:
            _start(envs)
            envs.scale(self.max_nodes)
            _step_until(envs, lambda: len(_agents(_places(envs))) == self.max_nodes)
            envs.scale(self.nodes)
            _step_until(envs, lambda: len(_agents(_places(envs))) == self.nodes)
            _step_until(envs, lambda: "node_left" in _kinds(envs))
            assert "node_lost" not in _kinds(envs), envs.events()
            places = _places(envs)
        self._await_nothing(folder, places)

    def test_close_is_bounded_and_leaves_nothing(self, folder: Path) -> None:
        envs = self._make(folder)
        places = _start(envs)
        begin = time.monotonic()
        envs.close()
        seconds = time.monotonic() - begin
        assert seconds < _CLOSE_S + 2.0, f"close() took {seconds:.1f} s"
        self._await_nothing(folder, places)

    def test_gc_removes_what_a_killed_head_left(self, folder: Path, tmp_path: Path) -> None:
        pickled = tmp_path / "backend"
        pickled.write_bytes(cloudpickle.dumps((self._backend(folder), self.num_envs)))
        command = [sys.executable, "-c", _HEAD, str(pickled)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
            assert head.stdout is not None
            line = head.stdout.readline()
            head.kill()
        places = json.loads(line)
        assert list(folder.glob("clusterenv-*")), "the run has no folder below the one that make_backend() was given"
        said: list[str] = []
        assert remove([folder], False, said.append) == (1, 0), f"`clusterenv gc` says: {said}"
        self._await_nothing(folder, places)

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


def _actions(envs: ce.ClusterEnv, slot: int = 0, action: int = STEP) -> Any:
    actions = np.full(envs.num_envs, STEP)
    actions[slot] = action
    return actions


def _start(envs: ce.ClusterEnv) -> Sequence[dict[str, Any]]:
    """Reset and step once, because a failure before the first step raises at once; return the environments' places."""
    envs.reset(seed=1)
    envs.step(_actions(envs))
    return envs.call("place")


def _step_until(envs: ce.ClusterEnv, condition: Callable[[], bool]) -> set[int]:
    """Step until the condition holds; return the slots that lost an episode on the way."""
    deadline, lost = time.monotonic() + _WAIT_S, set[int]()
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {_WAIT_S:.0f} s; events: {envs.events()}"
        infos = envs.step(_actions(envs))[4]
        if "transition_valid" in infos:
            lost |= set(np.flatnonzero(~infos["transition_valid"]).tolist())
    return lost


def _await(condition: Callable[[], bool], text: str, detail: Callable[[], Any] = lambda: "") -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{text} after {_WAIT_S:.0f} s {detail()}"
        time.sleep(0.1)


def _places(envs: ce.ClusterEnv) -> Sequence[dict[str, Any]]:
    """Return the environments' places; empty while one of them waits to be rebuilt."""
    try:
        places: Sequence[dict[str, Any]] = envs.call("place")
    except ce.WorkerLostError:
        return ()
    return places


def _agents(places: Sequence[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {(place["where"], place["agent"], place["began"]) for place in places}


def _kinds(envs: ce.ClusterEnv) -> list[str]:
    return [event.kind for event in envs.events()]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _same(ours: Any, theirs: Any) -> None:
    assert data_equivalence(ours, theirs, exact=True), f"{ours} in place of {theirs}"
