"""Bad input is refused by name, and the environments stay usable; partial batches; the rest of the public face."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv as ce
from toys import SpaceEnv, Trouble, same

BOX = spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture
def envs():
    made = ce.ClusterEnv([lambda i=i: Trouble(i) for i in range(4)], backend=ce.Local(workers=2))
    yield made
    made.close()


# -- what to build ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (("NoSuchEnv-v0",), {}, "NoSuchEnv"),
        (("no_such_module:Env-v0",), {}, "no_such_module"),
        (("CartPole-v1", 0), {}, "num_envs=0"),
        (("CartPole-v1", -3), {}, "num_envs=-3"),
        (("CartPole-v1", 2.5), {}, "num_envs=2.5"),
        (([],), {}, "empty list"),
        (([lambda: None, 3],), {}, r"env\[1\]=3"),
        (([lambda: Trouble()] * 2, 3), {}, "num_envs=3 but env has 2"),
        ((lambda: Trouble(), 2), {"env_kwargs": {"a": 1}}, "env_kwargs goes with"),
        ((42,), {}, "env=42"),
        ((ce.Vector(lambda n, seeds: None),), {}, "needs num_envs"),
        (("CartPole-v1", 2), {"autoreset_mode": "Sometimes"}, "autoreset_mode='Sometimes'"),
    ],
)
def test_a_bad_description_is_refused_by_name(args, kwargs, text):
    with pytest.raises(ce.SpecError, match=text):
        ce.ClusterEnv(*args, **kwargs)


def test_an_environment_instead_of_a_function_is_refused():
    with pytest.raises(ce.SpecError, match="pass a function that makes one"):
        ce.ClusterEnv(Trouble(), 2)


def test_an_unpicklable_thunk_is_refused_by_index():
    lock = threading.Lock()
    with pytest.raises(ce.SpecError, match=r"env\[1\] cannot be sent to a worker.*create that inside"):
        ce.ClusterEnv([lambda: Trouble(), lambda: Trouble(lock)])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_different_spaces_are_refused_with_both(workers):
    other = spaces.Box(-1, 1, (5,), np.float32)
    thunks = [lambda: SpaceEnv(BOX, spaces.Discrete(2)), lambda: SpaceEnv(other, spaces.Discrete(2))]
    with pytest.raises(ce.SpecError, match=r"slot 0 has Box.*\(3,\).*slot 1 has Box.*\(5,\)"):
        ce.ClusterEnv(thunks, backend=ce.Local(workers=workers))


def test_more_workers_than_environments_is_adjusted(caplog):
    envs = ce.ClusterEnv("CartPole-v1", num_envs=2, backend=ce.Local(workers=5))
    assert envs.stats()["workers"] == 2 and "need 2 workers at most" in caplog.text
    envs.close()


@pytest.mark.parametrize(
    "make", [lambda: ce.Local(workers=-1), lambda: ce.Recovery(on_error="x"), lambda: ce.Recovery(step_timeout_s=0)]
)
def test_bad_settings_are_refused(make):
    with pytest.raises(ce.SpecError):
        make()


def test_ids_registered_in_the_script_kwargs_and_specs_work():
    gym.register("Mine-v0", entry_point=lambda **kw: SpaceEnv(BOX, spaces.Discrete(2), **kw))
    try:
        with ce.ClusterEnv("Mine-v0", 2, env_kwargs={"length": 7}) as envs:
            assert envs.get_attr("length") == (7, 7) and envs.spec.id == "Mine-v0"
        with ce.ClusterEnv(gym.spec("Mine-v0"), 1) as envs:
            assert repr(envs) == "ClusterEnv(Mine-v0, num_envs=1)"
        with ce.make_vec("Mine-v0", 2, length=3, backend=ce.Local(workers=1)) as envs:
            assert envs.get_attr("length") == (3, 3)
    finally:
        del gym.registry["Mine-v0"]


def test_one_function_for_all():
    with ce.ClusterEnv(lambda: Trouble(3), 3) as envs:
        assert envs.num_envs == 3 and envs.reset()[0][:, 0].tolist() == [3, 3, 3]


# -- calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        (np.zeros(3, dtype=np.int64), r"shape \(3,\), expected \(4,\)"),
        (np.zeros((4, 1), dtype=np.int64), r"shape \(4, 1\)"),
        (np.zeros(4), "dtype float64, the action space says int64"),
        ([0, 1, 2, 3], "slot 3 is outside the space"),
        ([0, -1, 2, 0], "slot 1 is outside the space"),
        ("left", r"shape \(\)"),
        (None, "shape"),
        ([[0], [1, 2], 3, 4], "cannot become a numpy array"),
    ],
)
def test_bad_actions_are_refused_and_nothing_moves(envs, actions, text):
    envs.reset(seed=0)
    with pytest.raises(ce.ActionError, match=text):
        envs.step(actions)
    obs, *_ = envs.step([0, 1, 2, 0])
    assert obs[:, 3].tolist() == [1.0] * 4


def test_bad_actions_of_other_spaces():
    box = spaces.Dict(
        a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2)))
    )
    with ce.ClusterEnv(lambda: SpaceEnv(BOX, box), 2) as envs:
        envs.reset()
        good = {"a": np.zeros((2, 2)), "b": (np.zeros(2, int), np.zeros((2, 2), bool))}
        envs.step(good)
        with pytest.raises(ce.ActionError, match=r"\['a'\] of slot 0 is outside"):
            envs.step({**good, "a": np.full((2, 2), np.nan)})
        with pytest.raises(ce.ActionError, match=r"\['b'\]\[0\] has shape"):
            envs.step({**good, "b": (np.zeros(3, int), np.zeros((2, 2), bool))})
        with pytest.raises(ce.ActionError, match="structure"):
            envs.step({"a": good["a"]})
    with ce.ClusterEnv(lambda: SpaceEnv(BOX, spaces.Text(3)), 2) as envs:
        envs.reset()
        envs.step(("a", "b"))
        with pytest.raises(ce.ActionError, match="slot 1 is not in Text"):
            envs.step(("a", "too long"))
        with pytest.raises(ce.ActionError, match="1 actions for 2"):
            envs.step(("a",))


def test_checks_can_be_turned_off():
    continuous = spaces.Box(-1, 1, (1,), np.float32)
    off = ce.Recovery(check=False)
    with ce.ClusterEnv(lambda: SpaceEnv(BOX, continuous), 1, recovery=off) as envs:
        envs.reset()
        _, rewards, *_ = envs.step(np.array([[5.0]]))
        assert rewards.tolist() == [5.0]


class Huge(Trouble):
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.full(4, 3e38, np.float32), {}

    def step(self, action):
        return np.full(4, -3e38, np.float32), 1e308, False, False, {}


@pytest.mark.parametrize("workers", [0, 1])
def test_huge_numbers_are_no_fault(workers):
    with ce.ClusterEnv(Huge, 2, backend=ce.Local(workers=workers)) as envs:
        envs.reset()
        for _ in range(2):
            obs, rewards, _, truncations, infos = envs.step([0, 1])
            assert (obs == np.float32(-3e38)).all() and (rewards == 1e308).all()
            assert not truncations.any() and infos == {} and envs.events() == ()


def test_calls_at_the_wrong_moment(envs):
    with pytest.raises(ce.UsageError, match=r"step\(\) before reset"):
        envs.step([0] * 4)
    with pytest.raises(ce.UsageError, match=r"recv\(\) before reset"):
        envs.recv()
    envs.reset()
    with pytest.raises(ce.UsageError, match="nothing is in flight"):
        envs.recv()
    envs.send([0] * 4)
    for call in (lambda: envs.step([0] * 4), lambda: envs.send([0] * 4), lambda: envs.call("slot")):
        with pytest.raises(ce.UsageError, match="in flight"):
            call()
    with pytest.raises(ce.UsageError, match="min_envs=5"):
        envs.recv(min_envs=5)
    envs.recv()
    with pytest.raises(ce.UsageError, match="different and within"):
        envs.send([0, 0], [1, 1])
    with pytest.raises(ce.UsageError, match="different and within"):
        envs.send([0], [4])
    envs.close()
    for call in (envs.reset, lambda: envs.step([0] * 4), lambda: envs.call("slot"), envs.stats):
        with pytest.raises(ce.ClosedError, match="closed"):
            call()


@pytest.mark.parametrize("seed", ["a", 1.5, [1, 2]])
def test_bad_seeds(envs, seed):
    with pytest.raises(ce.SpecError, match="seed"):
        envs.reset(seed=seed)


def test_bad_masks(envs):
    for mask in ([True] * 4, np.ones(3, bool), np.zeros(4, bool), np.ones(4)):
        with pytest.raises(ce.SpecError, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})


def test_a_call_that_raises_leaves_the_environments_usable(envs):
    envs.reset()
    with pytest.raises(ce.EnvError, match="no_such_thing") as caught:
        envs.call("no_such_thing")
    assert caught.value.phase == "call"
    envs.step([0] * 4)


def test_views_without_copies_hold_until_the_step_after_the_next():
    with ce.ClusterEnv(lambda: Trouble(), 2, copy=False) as envs:
        envs.reset()
        first, *_ = envs.step([0, 0])
        second, *_ = envs.step([0, 0])
        assert first[:, 3].tolist() == [1, 1] and second[:, 3].tolist() == [2, 2]
        envs.step([0, 0])
        assert first[:, 3].tolist() == [3, 3]
        del first, second


# -- partial batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_partial_batches_ascend_and_name_their_slots(workers):
    thunks = [lambda i=i: SpaceEnv(BOX, spaces.Discrete(3), 3 + i, "rich") for i in range(4)]
    envs = ce.ClusterEnv(thunks, backend=ce.Local(workers=workers))
    refs = [SyncVectorEnv([thunk]) for thunk in thunks]
    envs.reset(seed=3)
    for i, ref in enumerate(refs):
        ref.reset(seed=[3 + i])
    rng = np.random.default_rng(0)
    for _ in range(60):
        chosen = rng.permutation(4)[: rng.integers(1, 5)].tolist()
        actions = rng.integers(0, 3, len(chosen))
        envs.send(actions, chosen)
        obs, rewards, terminations, truncations, infos = envs.recv()
        assert infos["slot"].tolist() == sorted(chosen)
        for row, slot in enumerate(sorted(chosen)):
            theirs = refs[slot].step(actions[[chosen.index(slot)]])
            ours = [obs[[row]], rewards[[row]], terminations[[row]], truncations[[row]]]
            same(ours, list(theirs[:4]))
            assert infos["t"][row] == theirs[4]["t"][0]
    envs.close()


def test_recv_returns_without_the_slow(tmp_path):
    class Slow(Trouble):
        def step(self, action):
            if action == 2:
                time.sleep(0.4)
            return super().step(action)

    envs = ce.ClusterEnv([lambda i=i: Slow(i) for i in range(4)], backend=ce.Local(workers=4))
    envs.reset()
    envs.send([0, 2, 0, 0])
    start = time.monotonic()
    *_, infos = envs.recv(min_envs=3)
    assert infos["slot"].tolist() == [0, 2, 3] and time.monotonic() - start < 0.35
    envs.send([1, 1, 1], [0, 2, 3])
    obs, *_, infos = envs.recv()
    assert infos["slot"].tolist() == [0, 1, 2, 3] and obs[:, 3].tolist() == [2, 1, 2, 2]
    envs.close()


# -- vector factories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_vector_factory_runs_whole_in_each_worker(workers, mode):
    def thunk():
        return SpaceEnv(BOX, spaces.Discrete(3), 4, "rich")

    def factory(num_envs, seeds):
        assert len(set(seeds)) == num_envs == len(seeds)
        return SyncVectorEnv([thunk] * num_envs, autoreset_mode=mode)

    envs = ce.ClusterEnv(ce.Vector(factory), 6, backend=ce.Local(workers=workers))
    assert envs.autoreset_mode is mode
    ref = SyncVectorEnv([thunk] * 6, autoreset_mode=mode)
    same(envs.reset(seed=4), ref.reset(seed=4))
    for _ in range(12):
        actions = ref.action_space.sample()
        same(envs.step(actions), ref.step(actions))
    same(envs.call("add", 1), ref.call("add", 1))
    if workers:
        with pytest.raises(ce.UsageError, match="step together"):
            envs.send([0], [0])
    envs.close()


def test_a_vector_factory_that_breaks_is_made_again(tmp_path):
    memory = str(tmp_path / "lives")

    def factory(num_envs, seeds):
        thunks = [lambda i=i: Trouble(i, "raise" if i == 0 else None, memory=memory) for i in range(num_envs)]
        return SyncVectorEnv(thunks)

    with ce.ClusterEnv(ce.Vector(factory), 2, backend=ce.Local(workers=1)) as envs:
        envs.reset(seed=0)
        envs.set_attr("mood", ["a", "b"])
        for _ in range(2):
            envs.step([0, 0])
        *_, truncations, infos = envs.step([0, 0])
        assert truncations.all() and not infos["transition_valid"].any()
        obs, *_ = envs.step([0, 0])
        assert obs[:, 3].tolist() == [0, 0] and obs[:, 1].tolist() == [1, 1]
        assert envs.get_attr("mood") == ("a", "b"), "each slot's own value, set again"


# -- the package ------------------------------------------------------------------------------------------------


def test_import_is_light():
    code = (
        "import sys, clusterenv\n"
        "for name in clusterenv.__all__: name == 'TorchPolicy' or getattr(clusterenv, name)\n"
        "heavy = {'torch', 'ray', 'kubernetes', 'rich', 'matplotlib', 'envpool', "
        "'stable_baselines3', 'multiprocessing.resource_tracker'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_worker_imports_nothing_of_the_head():
    code = (
        "import sys, clusterenv.worker.forkserver\n"
        "head = ('engine', 'executors', 'cluster', 'backends', 'driver', 'env', 'collector')\n"
        "print([name for name in sys.modules if name.startswith(tuple(f'clusterenv.{one}' for one in head))])"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "[]"


def test_names_are_the_same_for_type_checkers():
    """The block that only type checkers read, against what `clusterenv.NAME` imports."""
    tree = ast.parse(Path(ce.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found = {alias.name: node.module for node in block.body for alias in node.names if node.module != "clusterenv"}
    assert set(ce.__all__) <= {*found, "__version__"}
    for name, module in found.items():
        assert getattr(ce, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("backend", [ce.Local(workers=2), ce.Loopback(nodes=1)], ids=repr)
def test_make_vec_wraps_each_environment_as_gymnasiums_does(backend):
    wrappers = [
        gym.wrappers.RecordEpisodeStatistics,
        lambda env: gym.wrappers.TransformReward(env, lambda reward: 2 * reward),
    ]
    ours = ce.make_vec("CartPole-v1", 4, wrappers=wrappers, backend=backend, max_episode_steps=9)
    theirs = gym.make_vec("CartPole-v1", 4, "sync", wrappers=wrappers, max_episode_steps=9)
    try:
        assert ours.spec.id == theirs.spec.id == "CartPole-v1"
        same(ours.reset(seed=3), theirs.reset(seed=3))
        ended = 0
        for i in range(30):
            left, right = (list(envs.step(np.full(4, i % 2))) for envs in (ours, theirs))
            for infos in (left[4], right[4]):
                infos.get("episode", {}).pop("t", None)  # seconds
            same(left, right)
            ended += int(np.sum(left[4].get("_episode", 0)))
            assert (left[1] % 2.0 == 0.0).all()
        assert ended > 4
        recorded = ours.collector(ce.RandomPolicy(), seed=1).evaluate(episodes=2, deterministic=False, record=1)
        assert len(recorded.frames[0]) == recorded.lengths[0] + 1, "made anew with frames, and wrapped"
        assert recorded.infos[0]["episode"]["r"] * 2 == recorded.returns[0], "the first wrapper is the innermost"
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("made", [ce.Recovery, ce.Rollout, ce.rollout.Episodes, ce.Receipt, ce.Evaluation])
def test_help_describes_every_field(made):
    fields = getattr(made, "_fields", None) or [field.name for field in dataclasses.fields(made)]
    described = re.findall(r"^ {8}(\w+): \S", made.__doc__, re.MULTILINE)
    assert described == list(fields), "each on a line of its own, in their order"


def test_the_types_and_the_common_errors_are_at_the_top():
    types = {"Backend", "Evaluation", "Policy", "Receipt", "Standing"}
    assert types <= set(ce.__all__)
    of_ours = {name for name in ce.__all__ if name.endswith("Error")}
    assert of_ours == {"ClusterEnvError", "DeadlineError", "EnvError", "StartError", "WorkerLostError"}
    others = "Action Closed CrashLoop KeyFile NotPlain Policy Protocol Spec Usage"
    for name in [f"{word}Error" for word in others.split()]:
        assert getattr(ce, name) is getattr(ce.errors, name), "importable from the top as before"


def test_dir_lists_what_there_is_to_use_and_nothing_else():
    names = dir(ce)
    assert "TorchPolicy" in names and set(names) == set(ce.__all__)
    assert {"backends", "errors", "env", "pool", "Any"}.isdisjoint(names)
    with pytest.raises(AttributeError, match="no attribute 'Slrum'") as caught:
        ce.Slrum  # noqa: B018
    assert caught.value.obj is ce and caught.value.name == "Slrum", "so that Python can suggest Slurm"


def test_type_checkers_see_torch_policy(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import clusterenv as ce\nreveal_type(ce.TorchPolicy)\nce.Slrum\n")
    command = ["mypy", "--no-site-packages", "--ignore-missing-imports", f"--cache-dir={tmp_path}", str(script)]
    env = {**os.environ, "MYPYPATH": str(Path(ce.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, env=env, timeout=100).stdout
    assert "-> clusterenv.policy.acting.torch.TorchPolicy" in said, said
    assert 'Module has no attribute "Slrum"' in said, said


def test_a_batch_prints_shapes_and_counts():
    recovery = ce.Recovery(backoff_s=(0, 0))
    thunks = [lambda: Trouble(0), lambda: Trouble(1, "raise", at=6, always=True)]
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=0), recovery=recovery) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        collector.rollout(4)
        batch = collector.rollout(16)
        text = repr(batch)
        assert text.startswith(
            "Rollout(16 steps x 2 environments, 15 of 32 rows invalid, version 0, Episodes(2 ended, "
        )
        assert text.endswith("obs: float64[16, 2, 4], actions: int64[16, 2])") and "array(" not in text
        assert repr(batch.torch()).endswith("obs: float32[16, 2, 4], actions: int64[16, 2])")
        assert repr(batch.flatten()).startswith("Rollout(32 steps, 15 of 32 rows invalid, version 0, ")
        assert repr(batch.transitions()).startswith("Transitions(obs: float64[17, 4], actions: int64[17], rewards: ")
        assert repr(batch.episodes) == "Episodes(2 ended, mean return 10, length 10)"
        two = dataclasses.replace(
            batch,
            obs={"a": batch.obs, "b": (batch.rewards,)},
            versions=batch.versions + np.arange(2),
            infos={"speed": batch.rewards, "_speed": batch.valid},
        )
        assert "versions 0 to 1" in repr(two) and "infos['speed']: float64[16, 2]" in repr(two)
        assert "obs: {'a': float64[16, 2, 4], 'b': (float64[16, 2])}" in repr(two)
    assert repr(ce.rollout.Episodes()) == "Episodes(none ended)"
    evaluation = ce.rollout.Evaluation(np.ones(3), np.ones(3), np.arange(3), [])
    assert repr(evaluation) == "Evaluation(3 episodes, return 1 ± 0)"
