"""Collectors: every field of a rollout, whatever the spread of slots; faults; bad input."""

from __future__ import annotations

import os
import signal
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import clusterenv as ce
from ledgers import Ledger, constant, ledger
from toys import Trouble

TWO = ce.Local(workers=2, preload=("torch",))  # imported once, not by each worker


def expect_ledger(batch, where):
    """Walk every slot through the batch and compare each field; `where[slot]` = (episode, t) is carried on."""
    T, N = batch.rewards.shape
    finals = {tuple(at): obs for at, obs in zip(batch.final_at.tolist(), batch.final_obs, strict=True)}
    ends = []
    for n in range(N):
        episode, t = where[n]
        for row in range(T):
            assert batch.obs[row, n].tolist() == [n, 0, episode, t]
            assert batch.episode_starts[row, n] == (t == 0)
            t += 1
            over = t >= Ledger.length(n, episode)
            assert batch.rewards[row, n] == 10.0 * episode + t
            assert batch.terminations[row, n] == (over and Ledger.terminates(n, episode))
            assert batch.truncations[row, n] == (over and not Ledger.terminates(n, episode))
            assert batch.infos["_t"][row, n] == (t != 3)
            assert batch.infos["t"][row, n] == (t if t != 3 else 0)
            if over:
                assert finals.pop((row, n)).tolist() == [n, 0, episode, t]
                total = sum(10.0 * episode + i for i in range(1, t + 1))
                ends.append((row, n, total, t))
                episode, t = episode + 1, 0
        assert batch.last_obs[n].tolist() == [n, 0, episode, t]
        where[n] = (episode, t)
    assert not finals
    table = batch.episodes
    assert sorted(ends) == list(
        zip(table.t.tolist(), table.slots.tolist(), table.returns.tolist(), table.lengths.tolist(), strict=True)
    )
    assert batch.valid.all() and (batch.versions == 0).all() and batch.slots.tolist() == list(range(N))
    following = batch.next_obs()
    for row in range(T):
        for n in range(N):
            assert following[row, n, 2:].tolist() == [batch.obs[row, n, 2], batch.obs[row, n, 3] + 1]


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode), ids=lambda m: m.name)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_field_over_terminations_truncations_and_fragment_ends(workers, mode):
    with ledger(5, workers, autoreset_mode=mode) as envs:
        collector = envs.collector(constant(), seed=3, info_keys=["t", "odd"])
        where = dict.fromkeys(range(5), (0, 0))
        for num_steps in (1, 7, 2, 30):
            expect_ledger(collector.rollout(num_steps), where)


def test_the_last_info_is_kept_and_the_environments_own_statistics_are_preferred():
    def thunk():
        return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))

    with ce.ClusterEnv([thunk] * 4, backend=ce.Local(workers=2)) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(100)
    assert len(batch.episodes) > 4
    for total, length, info in zip(batch.episodes.returns, batch.episodes.lengths, batch.episodes.infos, strict=True):
        assert info["episode"]["r"] == total == length


def test_step_and_rollout_take_turns():
    with ledger(4, 2) as envs:
        envs.reset(seed=0)
        collector = envs.collector(constant(), info_keys=["t", "odd"])
        obs, *_ = envs.step(np.zeros(4, dtype=np.int64))
        batch = collector.rollout(3)
        assert np.array_equal(batch.obs[0], obs) and not batch.episode_starts[0].any()
        whole = {(int(s), int(t)) for s, t in zip(batch.episodes.slots, batch.episodes.t, strict=True)}
        begun_by_step = {(n, t) for t, n in batch.final_at.tolist() if batch.obs[t, n, 2] == 0}
        assert not whole & begun_by_step, "an episode whose beginning is not known has no return"
        obs, *_ = envs.step(np.zeros(4, dtype=np.int64))
        assert np.array_equal(obs, batch.last_obs + [0, 0, 0, 1])


def test_an_ended_episode_is_followed_by_a_new_one():
    """NEXT_STEP: the step before the rollout ended the episode, and its reset row never came."""
    with ledger(2, 1) as envs:
        envs.reset()
        for _ in range(2):
            _, _, terminations, truncations, _ = envs.step(np.zeros(2, dtype=np.int64))
        assert (terminations | truncations).tolist() == [True, False]
        batch = envs.collector(constant()).rollout(2)
        assert batch.obs[0].tolist() == [[0, 0, 1, 0], [1, 0, 0, 2]]
        assert batch.episode_starts[0].tolist() == [True, False]


class Mlp(nn.Module):
    def __init__(self, size, actions):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions))

    def forward(self, obs):
        return self.net(obs)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
        )
        self.net(torch.zeros(1, 3, 20, 20))

    def forward(self, obs):
        return self.net(obs / 255.0)


class Blobs(gym.Env):
    """Images that depend on the actions taken."""

    observation_space = spaces.Box(0, 255, (3, 20, 20), np.uint8)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.image = self.np_random.integers(0, 256, (3, 20, 20), dtype=np.uint8)
        return self.image.copy(), {}

    def step(self, action):
        self.image = np.roll(self.image + np.uint8(action), int(action) + 1, axis=2)
        return self.image.copy(), float(action), bool(self.np_random.random() < 0.05), False, {}


@pytest.mark.parametrize("kind", ["numpy", "mlp", "cnn"])
def test_trajectories_do_not_depend_on_the_spread_of_slots(kind):
    torch.manual_seed(0)
    env = Blobs if kind == "cnn" else lambda: gym.make("LunarLander-v3")
    if kind == "numpy":
        w = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        agent = ce.NumpyPolicy(lambda weights, obs: obs @ weights["w"], {"w": w})
    else:
        agent = ce.TorchPolicy(Cnn() if kind == "cnn" else Mlp(8, 4), dist="categorical")
    batches = []
    for workers in (1, 2, 5, *((64,) if kind != "cnn" else ())):
        preload = ("gymnasium.envs.box2d.lunar_lander", *(() if kind == "numpy" else ("torch",)))
        backend = ce.Local(workers=workers, preload=preload)
        with ce.ClusterEnv([env] * 64, backend=backend) as envs:
            collector = envs.collector(agent, seed=7)
            batches.append([collector.rollout(20), collector.rollout(12)])
    for batch in batches[1:]:
        for ours, first in zip(batch, batches[0], strict=True):
            for name in (
                "obs",
                "actions",
                "rewards",
                "logprobs",
                "terminations",
                "truncations",
                "last_obs",
                "final_at",
            ):
                assert np.array_equal(getattr(ours, name), getattr(first, name)), name


def test_changed_weights_become_a_version_and_unchanged_ones_none():
    module = nn.Linear(4, 2)
    with ce.ClusterEnv("CartPole-v1", 4, backend=TWO) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1)
        assert (collector.rollout(4).versions == 0).all()
        assert (collector.rollout(4).versions == 0).all()
        with torch.no_grad():
            module.weight.zero_()
            module.bias.copy_(torch.tensor([50.0, -50.0]))
        batch = collector.rollout(4)
        assert (batch.versions == 1).all() and (batch.actions == 0).all() and np.abs(batch.logprobs).max() == 0
        with torch.no_grad():
            module.bias.add_(0.0)  # touched, not changed
        assert (collector.rollout(4).versions == 1).all()
        assert collector.stats()["version"] == 1 and collector.stats()["weight_bytes"] > 2 * 40


def test_prefetch_acts_with_the_version_at_hand():
    module = nn.Linear(4, 2)
    with ce.ClusterEnv("CartPole-v1", 4, backend=TWO) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1, prefetch=True)
        first = collector.rollout(8)
        with torch.no_grad():
            module.weight.add_(1.0)
        second = collector.rollout(8)
        assert (first.versions == 0).all() and (second.versions == 0).all()
        assert second.receipts[0].lag == 0 and (collector.rollout(8).versions == 1).all()
        assert np.array_equal(second.obs[0], first.last_obs)
        collector.evaluate(episodes=3, seed=5)  # the fragment that is under way is not lost by it
        with pytest.raises(ce.UsageError, match="8 steps is under way"):
            collector.rollout(4)
        with pytest.raises(ce.UsageError, match="another collector's fragment"):
            envs.collector(ce.RandomPolicy()).rollout(8)
        with pytest.raises(ce.UsageError, match="step\\(\\) while a fragment of 8 steps is under way"):
            envs.step(np.zeros(4, dtype=np.int64))
        envs.reset(seed=1)
        assert collector.rollout(4).episode_starts[0].all()


def test_views_are_of_shared_memory_and_copies_are_not():
    with ledger(4, 2) as envs:
        collector = envs.collector(constant())
        copied = collector.rollout(3)
        viewed = collector.rollout(3, copy=False)
        before = copied.obs.copy()
        assert viewed.obs.base is not None
        collector.rollout(3)
        collector.rollout(3)
        assert np.array_equal(copied.obs, before) and not np.array_equal(viewed.obs[0], copied.obs[0])


# -- faults -----------------------------------------------------------------------------------------------------


def troubled(tmp_path, what, **kwargs):
    memory = str(tmp_path / "lives")

    def thunk(i):
        return lambda: Trouble(i, what if i == 1 else None, memory=memory, at=5, length=7, **kwargs)

    recovery = ce.Recovery(backoff_s=(0.05, 0.1), step_timeout_s=2.0)
    return ce.ClusterEnv([thunk(i) for i in range(4)], backend=ce.Local(workers=2), recovery=recovery)


@pytest.mark.parametrize("what", ["kill", "segfault", "hang"])
def test_a_lost_worker_runs_its_fragment_again(tmp_path, what):
    with troubled(tmp_path, what) as envs:
        collector = envs.collector(constant(), seed=1)
        first = collector.rollout(3)
        batch = collector.rollout(6)
        assert batch.valid.all() and batch.obs.shape == (6, 4, 4)
        lives = batch.obs[:, :, 1]
        assert (lives[:, :2] == 1).all() and (lives[:, 2:] == 0).all(), "slots of the other worker go on untouched"
        assert batch.episode_starts[0].tolist() == [True, True, False, False]
        assert (batch.obs[0, :2, 3] == 0).all() and np.array_equal(batch.obs[0, 2:], first.last_obs[2:])
        assert (np.diff(batch.obs[:, :2, 3], axis=0) == 1).all()
        kinds = [event.kind for event in envs.events()]
        assert kinds.count("worker_lost") == 1
        assert collector.rollout(4).valid.all()


def test_a_lost_fragment_can_be_masked_instead(tmp_path):
    with troubled(tmp_path, "kill") as envs:
        collector = envs.collector(constant(), seed=1, on_loss="mask")
        collector.rollout(3)
        batch = collector.rollout(6)
        assert not batch.valid[:, :2].any() and batch.valid[:, 2:].all()
        assert not batch.terminations[:, :2].any() and batch.rewards[:, :2].sum() == 0
        again = collector.rollout(6)
        assert again.valid.all() and again.episode_starts[0, :2].all() and (again.obs[0, :2, 1] == 1).all()
        assert collector.stats()["invalid_rows"] == 12 and collector.stats()["steps"] == 3 * 4 + 6 * 2 + 6 * 4


@pytest.mark.parametrize("what", ["raise", "nan", "shape", "inf_reward", "exit"])
def test_an_environment_that_fails_costs_its_own_column_from_there(tmp_path, what):
    with troubled(tmp_path, what) as envs:
        collector = envs.collector(constant(), seed=1)
        collector.rollout(2)
        batch = collector.rollout(8)  # the third step of these is the fifth of the episode
        assert batch.valid[:, [0, 2, 3]].all()
        assert batch.valid[:, 1].tolist() == [True, True] + [False] * 6
        assert batch.truncations[:, 1].tolist() == [False, False, True] + [False] * 5
        assert not batch.terminations[:, 1].any() and batch.rewards[2:, 1].sum() == 0
        final = dict(zip(map(tuple, batch.final_at.tolist()), batch.final_obs.tolist(), strict=True))
        assert final[(2, 1)] == [1, 0, 0, 4], "the last real state"
        assert all(slot != 1 for slot in batch.episodes.slots)
        again = collector.rollout(3)
        assert again.valid.all() and again.obs[:, 1].tolist() == [[1, 1, 0, t] for t in range(3)]
        assert again.episode_starts[0].tolist()[1]


@pytest.mark.parametrize("wrong", ["shape", "nan", "reward"])
def test_a_bad_last_row_costs_its_column_and_no_worker(wrong, tmp_path):
    marker = tmp_path / "done"

    class BadEnd(Ledger):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            if self.slot == 1 and self.episode == 1 and (terminated or truncated) and not marker.exists():
                marker.touch()
                obs = obs[:2] if wrong == "shape" else obs * np.nan if wrong == "nan" else obs
                reward = "much" if wrong == "reward" else reward
            return obs, reward, terminated, truncated, info

    recovery = ce.Recovery(backoff_s=(0.01, 0.1))
    thunks = [lambda i=i: BadEnd(i) for i in range(4)]
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=2), recovery=recovery) as envs:
        collector = envs.collector(constant(), seed=1)
        batch = collector.rollout(40)
        end = Ledger.length(1, 0) + Ledger.length(1, 1) - 1
        assert batch.valid[:, [0, 2, 3]].all()
        assert batch.valid[:end, 1].all() and not batch.valid[end:, 1].any() and batch.truncations[end, 1]
        assert np.isfinite(batch.final_obs).all() and np.isfinite(batch.obs).all()
        assert [event.kind for event in envs.events() if event.kind in ("env_error", "worker_lost")] == ["env_error"]
        assert collector.rollout(5).valid.all()


def test_a_kill_from_outside_at_any_moment_splices_nothing(tmp_path):
    with troubled(tmp_path, None) as envs:
        collector = envs.collector(constant(), seed=1)
        collector.rollout(2)
        stop = threading.Event()

        def killer():
            for _ in range(3):
                if stop.wait(0.3):
                    return
                pid = envs.stats()["worker_pids"][0]
                if pid:
                    os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            previous = None
            while thread.is_alive():
                batch = collector.rollout(50)
                assert batch.valid.all()
                life, episode, t = batch.obs[..., 1], batch.obs[..., 2], batch.obs[..., 3]
                inside = ~batch.episode_starts[1:]
                assert (np.diff(t, axis=0)[inside] == 1).all() and (np.diff(episode, axis=0)[inside] == 0).all()
                assert (np.diff(life, axis=0) == 0).all(), "one fragment, one incarnation"
                if previous is not None:
                    goes_on = ~batch.episode_starts[0]
                    assert np.array_equal(batch.obs[0][goes_on], previous.last_obs[goes_on])
                previous = batch
        finally:
            stop.set()
            thread.join()


def test_a_failure_in_the_first_step_raises_at_once():
    class Typo(Ledger):
        def step(self, action):
            return self._obs(), undefined_name, False, False, {}  # noqa: F821

    with (
        ce.ClusterEnv([lambda: Typo(0)] * 2, backend=ce.Local(workers=1)) as envs,
        pytest.raises(ce.EnvError, match="undefined_name"),
    ):
        envs.collector(constant()).rollout(4)


def test_a_deadline_loses_nothing():
    class Slow(Ledger):
        def step(self, action):
            time.sleep(0.05)
            return super().step(action)

    with ce.ClusterEnv([lambda i=i: Slow(i) for i in range(2)], backend=ce.Local(workers=1)) as envs:
        collector = envs.collector(constant(), info_keys=["t"])
        with pytest.raises(ce.DeadlineError, match=r"workers \[0\]"):
            collector.rollout(6, timeout_s=0.2)
        expect_ledger(collector.rollout(6, timeout_s=60), {0: (0, 0), 1: (0, 0)})


# -- step(agent), evaluate, resuming ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [gym.vector.AutoresetMode.NEXT_STEP, gym.vector.AutoresetMode.SAME_STEP])
def test_step_takes_an_agent(mode):
    """The same rows as `step(actions)` with the actions that the infos name."""
    agent = ce.TorchPolicy(nn.Linear(4, 2), dist="categorical")
    rows = []
    with ce.ClusterEnv("CartPole-v1", 5, backend=TWO, autoreset_mode=mode) as envs:
        obs, _ = envs.reset(seed=3)
        for _ in range(60):
            before = obs
            obs, rewards, terminations, truncations, infos = envs.step(agent)
            with torch.no_grad():
                own = torch.log_softmax(agent.module(torch.from_numpy(before)), 1).numpy()
            assert np.allclose(own[np.arange(5), infos["action"]], infos["logprob"], atol=1e-6)
            assert infos["_action"].all() and (infos["policy_version"] == 0).all()
            rows.append((infos["action"], obs, rewards, terminations, truncations))
    assert np.any([row[3] for row in rows])
    with ce.ClusterEnv("CartPole-v1", 5, backend=ce.Local(workers=0), autoreset_mode=mode) as envs:
        envs.reset(seed=3)
        for action, *expected in rows:
            got = envs.step(action)
            assert all(np.array_equal(a, b) for a, b in zip(got[:4], expected, strict=True))


def test_step_with_an_agent_that_fails_can_be_tried_again():
    module = nn.Linear(4, 2)
    agent = ce.TorchPolicy(module, dist="categorical")
    with ce.ClusterEnv("CartPole-v1", 4, backend=TWO) as envs:
        envs.reset(seed=1)
        envs.step(agent)
        with torch.no_grad():
            module.bias.fill_(float("nan"))
        with pytest.raises(ce.PolicyError, match="not finite"):
            envs.step(agent)
        with torch.no_grad():
            module.bias.zero_()
        envs.step(agent)


def test_evaluate_agrees_with_a_plain_loop_and_leaves_training_alone():
    torch.manual_seed(3)
    module, other = nn.Linear(4, 2), nn.Linear(4, 2)

    def plain(net):
        env, returns = gym.make("CartPole-v1"), []
        for j in range(11):
            obs, _ = env.reset(seed=100 + j)
            total, over = 0.0, False
            while not over:
                obs, reward, terminated, truncated, _ = env.step(int(net(torch.from_numpy(obs)).argmax()))
                total, over = total + reward, terminated or truncated
            returns.append(total)
        env.close()
        return returns

    for workers in (0, 1, 3):
        with ce.ClusterEnv("CartPole-v1", 4, backend=ce.Local(workers=workers, preload=("torch",))) as envs:
            collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1)
            first = collector.rollout(5)
            mine = collector.evaluate(episodes=11, seed=100)
            theirs = collector.evaluate(ce.TorchPolicy(other, dist="categorical"), episodes=11, seed=100)
            sampled = [collector.evaluate(episodes=6, deterministic=False, seed=5).returns.tolist() for _ in range(2)]
            again = collector.rollout(5)
            assert np.array_equal(again.obs[0], first.last_obs) and (again.versions == 0).all()
        assert mine.returns.tolist() == plain(module) and theirs.returns.tolist() == plain(other)
        assert mine.lengths.tolist() == mine.returns.tolist() and mine.seeds.tolist() == list(range(100, 111))
        assert sampled[0] == sampled[1] != mine.returns[:6].tolist()


def test_evaluate_brings_frames_back(tmp_path):
    with ce.ClusterEnv("CartPole-v1", 2, backend=ce.Local(workers=1)) as envs:
        collector = envs.collector(constant_cartpole())
        with pytest.raises(ce.SpecError, match="record=3"):
            collector.evaluate(episodes=2, record=3)
        result = collector.evaluate(episodes=3, record=2)
        assert [len(frames) for frames in result.frames] == (result.lengths[:2] + 1).tolist()
        assert result.frames[0][0].shape == (400, 600, 3)
        result.save_gif(tmp_path / "episode.gif")
        assert (tmp_path / "episode.gif").read_bytes().startswith(b"GIF89a")
    with ledger(2, 1) as envs, pytest.raises(ce.EnvError, match='render_mode="rgb_array"'):
        envs.collector(constant()).evaluate(episodes=2, record=1)


def constant_cartpole():
    return ce.NumpyPolicy(lambda w, obs: np.tile(w["l"], (len(obs), 1)), {"l": np.array([0.0, 1.0], np.float32)})


def test_a_later_run_goes_on(tmp_path):
    def run(state):
        with ce.ClusterEnv("CartPole-v1", 3, backend=ce.Local(workers=2)) as envs:
            if state is not None:
                envs.load_state_dict(state)
            else:
                envs.set_attr("gravity", 5.0)
            collector = envs.collector(constant_cartpole(), seed=11)
            batch = collector.rollout(4)
            return batch, envs.state_dict(), envs.get_attr("gravity"), collector.stats(), envs.events()

    first, state, *_ = run(None)
    second, later, gravity, stats, events = run(torch_roundtrip(state, tmp_path))
    assert gravity == (5.0, 5.0, 5.0)
    assert not np.array_equal(first.obs[0], second.obs[0]), "other episodes, not the same again"
    assert later["pool"]["incarnations"] == [1, 1, 1] and stats["steps"] == 24
    assert (second.versions == first.versions + 1).all()
    assert any("begin anew" in event.reason for event in events)
    with ce.ClusterEnv("CartPole-v1", 2) as envs, pytest.raises(ce.SpecError, match="saved with 3 environments"):
        envs.load_state_dict(state)


def torch_roundtrip(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=False)


def test_stats_say_where_the_time_went():
    with ce.ClusterEnv("CartPole-v1", 4, backend=ce.Local(workers=2)) as envs:
        collector = envs.collector(constant_cartpole(), seed=1)
        for _ in range(3):
            collector.rollout(50)
        stats, summary = collector.stats(), collector.summary()
    assert stats["steps"] == 600 and stats["rollouts"] == 3 and stats["restarts"] == 0
    assert 0.9 < sum(stats["time_shares"].values()) < 1.1 and stats["time_shares"]["environment"] > 0
    assert len(stats["worker_steps_per_s"]) == 2
    assert all(isinstance(value, float) for value in summary.values()) and 10 < len(summary) < 20
    assert summary["sync/lag"] == 0.0 and summary["sync/bytes_saved"] == summary["sync/pulls_saved"] == 0.0
    assert summary["sync/mean_drift"] == 0.0, "the newest version acted"


def test_a_prefetched_fragment_stays_its_collectors_while_another_one_evaluates():
    with ledger(4, 2) as envs:
        one = envs.collector(constant((50, 0, 0)), seed=1, prefetch=True)
        other = envs.collector(constant((0, 50, 0)), seed=1)
        assert (one.rollout(8).actions == 0).all()
        assert other.evaluate(episodes=2).returns.size == 2
        with pytest.raises(ce.UsageError, match="another collector's fragment is under way"):
            other.rollout(8)
        batch = one.rollout(8)
        assert (batch.actions == 0).all() and len(batch.receipts) == 2
        other.evaluate(episodes=2)
        envs.reset()
        assert [each.stats()["dropped_fragments"] for each in (one, other)] == [2, 0]
        assert envs.state_dict()["collector"] == other.state_dict(), "whose policy the workers have"
        assert (other.rollout(8).actions == 1).all() and (one.rollout(8).actions == 0).all()
