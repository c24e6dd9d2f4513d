"""Policies: log-probabilities against torch's own, known shapes, masks, recurrence, and what is refused."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from torch import nn
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

import clusterenv as ce
from clusterenv.policy.acting.distributions import family_for
from clusterenv.policy.acting.random_streams import Streams
from policies import draw, logprob
from toys import DiesOnce, ReportsImports

TWO = ce.Local(workers=2, preload=("torch",))  # imported once, not by each worker
OBS = 5
ACTIONS = {
    "discrete": spaces.Discrete(4, start=2),
    "multi": spaces.MultiDiscrete([3, 2, 4]),
    "binary": spaces.MultiBinary(3),
    "box": spaces.Box(-2.0, 3.0, (2,), np.float32),
}


class Any_(gym.Env):
    """Any action space; the observation is noise that the last action moves."""

    def __init__(self, action_space, dict_obs=False):
        self.action_space = action_space
        self.observation_space = spaces.Box(-50, 50, (OBS,), np.float32)
        self.received = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(0.0), {}

    def _obs(self, shift):
        return np.clip(self.np_random.normal(size=OBS) + shift, -50, 50).astype(np.float32)

    def step(self, action):
        assert self.action_space.contains(action), action
        self.received = action
        self.t += 1
        return self._obs(float(np.mean(action)) / 10), float(np.sum(action)), self.t >= 9, False, {}


def collect(space, policy, steps=25, workers=0, num_envs=5):
    backend = ce.Local(workers=workers)
    with ce.ClusterEnv(lambda: Any_(space), num_envs, backend=backend) as envs:
        return envs.collector(policy, seed=4).rollout(steps)


def flat(batch):
    rows = batch.flatten()
    return torch.from_numpy(rows.obs), torch.from_numpy(rows.actions), torch.from_numpy(rows.logprobs)


def net(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, outputs))


def tanh_normal(mean, log_std, space):
    scale, middle = torch.tensor((space.high - space.low) / 2), torch.tensor((space.high + space.low) / 2)
    return TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(), AffineTransform(middle, scale)])


# name → (action space, module, dist=, the module's own distribution, by torch)
BOX = ACTIONS["box"]
FAMILIES = {
    "categorical": ("discrete", net(4), "categorical", lambda m, o, a: Categorical(logits=m(o)).log_prob(a - 2)),
    "multi-categorical": (
        "multi",
        net(9),
        lambda m, o: [Categorical(logits=part) for part in m(o).split([3, 2, 4], dim=1)],
        lambda m, o, a: sum(
            Categorical(logits=part).log_prob(a[:, i]) for i, part in enumerate(m(o).split([3, 2, 4], dim=1))
        ),
    ),
    "bernoulli": (
        "binary",
        net(3),
        lambda m, o: Independent(Bernoulli(logits=m(o)), 1),
        lambda m, o, a: Bernoulli(logits=m(o)).log_prob(a.float()).sum(1),
    ),
    "normal": (
        "box",
        net(2),
        lambda m, o: Independent(Normal(m(o), torch.full((2,), 0.7).expand(len(o), 2)), 1),
        lambda m, o, a: Normal(m(o), 0.7).log_prob(a).sum(1),
    ),
    "tanh-normal": (
        "box",
        net(2),
        lambda m, o: tanh_normal(0.3 * m(o), torch.full((len(o), 2), -1.0), BOX),
        lambda m, o, a: tanh_normal(0.3 * m(o), torch.full((len(o), 2), -1.0), BOX).log_prob(a).sum(1),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_log_probabilities_are_the_modules_own(name):
    space, module, dist, own = FAMILIES[name]
    batch = collect(ACTIONS[space], ce.TorchPolicy(module, dist=dist))
    obs, actions, logprobs = flat(batch)
    with torch.no_grad():
        theirs = own(module, obs, actions)
    assert torch.allclose(theirs, logprobs, atol=1e-5), (theirs - logprobs).abs().max()
    assert len(np.unique(batch.actions.reshape(-1, *batch.actions.shape[2:]), axis=0)) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_follow_the_distribution(name):
    """Frequencies and means of many samples, against torch's own."""
    space = FAMILIES[name][0]
    family = family_for(name, ACTIONS[space])
    params = np.tile(np.random.default_rng(0).normal(size=(1, family.num_params)).astype(np.float32), (40_000, 1))
    noise = Streams(0).draw([0], [0], 40_000, family.noise, family.noise_size)[:, 0]
    sample = draw(family, params, noise)
    again = logprob(name, params, sample.actions, ACTIONS[space])
    # Near the edge a float32 action no longer tells what it was before the squash.
    sure = (np.abs(sample.actions - 0.5) < 2.45).all(axis=1) if name == "tanh-normal" else slice(None)
    assert np.allclose(sample.logprobs[sure], again[sure], atol=2e-3)
    if name == "categorical":
        share = np.bincount(sample.actions - 2, minlength=4) / len(params)
        assert np.allclose(share, np.exp(params[0]) / np.exp(params[0]).sum(), atol=0.01)
    elif name == "bernoulli":
        assert np.allclose(sample.actions.mean(axis=0), 1 / (1 + np.exp(-params[0])), atol=0.01)
    elif name == "normal":
        assert np.allclose(sample.actions.mean(axis=0), params[0, :2], atol=0.1)
        assert np.allclose(sample.actions.std(axis=0), np.exp(params[0, 2:]), rtol=0.03)
    elif name == "tanh-normal":
        assert (sample.actions >= BOX.low).all() and (sample.actions <= BOX.high).all()


def test_environments_get_clipped_actions_and_the_batch_the_sampled_ones():
    batch = collect(BOX, ce.TorchPolicy(net(2), dist=lambda m, o: Normal(m(o), torch.full((len(o), 2), 9.0))))
    assert (batch.actions > BOX.high).any() and (batch.actions < BOX.low).any()


def test_deterministic_policies_explore_by_noise_per_slot():
    sigma = np.array([0.0, 0.0, 0.1, 0.1, 0.1])
    policy = ce.TorchPolicy(net(2), dist="deterministic", noise=sigma)
    batch = collect(BOX, policy)
    with torch.no_grad():
        plain = policy.module(torch.from_numpy(batch.obs)).numpy()
    moved = np.abs(batch.actions - np.clip(plain, BOX.low, BOX.high)).max(axis=(0, 2))
    assert (moved[:2] < 1e-6).all() and (moved[2:] > 0.05).all()
    assert (batch.logprobs[:, :2] == 0).all()
    z = (batch.actions - plain)[:, 2:] / 0.1
    own = Normal(0.0, 0.1).log_prob(torch.from_numpy(z * 0.1)).sum(-1).numpy()
    inside = (np.abs(batch.actions) < 1.99).all(axis=2)[:, 2:]
    assert np.allclose(own[inside], batch.logprobs[:, 2:][inside], atol=1e-4)


def test_epsilon_greedy_has_an_epsilon_per_slot_that_can_change():
    policy = ce.TorchPolicy(net(4), dist="epsilon-greedy", epsilon=np.array([0.0, 0.0, 0.5, 1.0, 1.0]))
    with ce.ClusterEnv(lambda: Any_(ACTIONS["discrete"]), 5, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(policy, seed=1)
        batch = collector.rollout(200)
        with torch.no_grad():
            greedy = policy.module(torch.from_numpy(batch.obs)).argmax(-1).numpy() + 2
        same = (batch.actions == greedy).mean(axis=0)
        assert same[0] == same[1] == 1.0 and 0.5 < same[2] < 0.75 and (same[3:] < 0.4).all()
        chance = np.where(batch.actions == greedy, 0.5 + 0.125, 0.125)[:, 2]
        assert np.allclose(batch.logprobs[:, 2], np.log(chance), atol=1e-6)
        policy.epsilon = 0.0
        assert (collector.rollout(5).logprobs == 0).all()


# -- known shapes -----------------------------------------------------------------------------------------------


class CleanRL(nn.Module):
    """The shape of CleanRL's discrete agent."""

    def __init__(self, outputs=4, offset=0):
        super().__init__()
        self.critic = net(1)
        self.actor = net(outputs)
        self.offset = offset

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action - self.offset
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class CleanRLContinuous(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = net(1)
        self.actor_mean = net(2)
        self.actor_logstd = nn.Parameter(torch.full((1, 2), -0.5))

    def get_action_and_value(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


class CleanRLNetwork(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(OBS, 8), nn.ReLU())
        self.actor, self.critic = nn.Linear(8, 4), nn.Linear(8, 1)
        self.scale = scale

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x / self.scale)
        probs = Categorical(logits=self.actor(hidden))
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


@pytest.mark.parametrize(
    ("module", "space", "name"),
    [
        (CleanRL(offset=2), "discrete", "CleanRL discrete"),
        (CleanRLContinuous(), "box", "CleanRL continuous"),
    ],
    ids=["discrete", "continuous"],
)
def test_known_shapes_need_no_dist_and_the_critic_stays_at_home(module, space, name):
    policy = ce.TorchPolicy(module)
    with ce.ClusterEnv(lambda: Any_(ACTIONS[space]), 4, backend=ce.Local(workers=0)) as envs:
        prepared = policy.prepare(envs.single_observation_space, envs.single_action_space)
        assert prepared.description.startswith(name) and "agrees" in prepared.description
        assert not any("critic" in key for key in policy.weights())
        batch = envs.collector(module, seed=1).rollout(10)
    obs, actions, logprobs = flat(batch)
    with torch.no_grad():
        own = module.get_action_and_value(obs, actions)[1]
    assert torch.allclose(own, logprobs, atol=1e-5)


@pytest.mark.parametrize(("scale", "name"), [(255.0, "CleanRL pixels"), (1.0, "CleanRL network + actor")])
def test_the_right_one_of_two_likely_shapes_is_found_by_its_log_probability(scale, name):
    policy = ce.TorchPolicy(CleanRLNetwork(scale))
    prepared = policy.prepare(spaces.Box(0, 255, (OBS,), np.float32), spaces.Discrete(4))
    assert prepared.description.startswith(name)


@pytest.mark.parametrize("space", ["discrete0", "multi", "binary", "box"])
def test_sb3_policies_act_as_they_do_at_home(space):
    action_space = spaces.Discrete(4) if space == "discrete0" else ACTIONS[space]
    model = PPO("MlpPolicy", Any_(action_space), n_steps=16, batch_size=16, seed=1, device="cpu")
    batch = collect(action_space, model, steps=12)
    obs, actions, logprobs = flat(batch)
    with torch.no_grad():
        _, own, _ = model.policy.evaluate_actions(obs, actions.float() if space == "binary" else actions)
    assert torch.allclose(own, logprobs, atol=1e-5)


def test_a_worker_imports_torch_and_not_what_torch_has_for_compilers():
    """Sympy would be half a second of CPU for each worker, before its first step."""
    with ce.ClusterEnv(ReportsImports, 1, backend=ce.Local(workers=1)) as envs:
        envs.collector(ce.TorchPolicy(nn.Linear(OBS, 2), dist="categorical", runtime="torch")).rollout(2)
        assert envs.call("imported", "torch") == (True,) and envs.call("imported", "sympy") == (False,)


def test_what_does_not_travel_must_not_matter():
    policy = ce.TorchPolicy(CleanRLNetwork(1.0), acting=["actor"])
    with pytest.raises(ce.PolicyError, match="leaves out weights that acting needs"):
        policy.prepare(spaces.Box(0, 255, (OBS,), np.float32), spaces.Discrete(4))
    policy = ce.TorchPolicy(CleanRL(), acting=["actr"])
    with pytest.raises(ce.PolicyError, match="names nothing in the module's state_dict"):
        policy.prepare(spaces.Box(0, 255, (OBS,), np.float32), spaces.Discrete(4))


def test_buffers_travel_with_the_weights_and_the_module_acts_in_eval_mode():
    module = nn.Sequential(nn.BatchNorm1d(OBS), nn.Dropout(0.5), net(4)).train()
    module[0].running_mean.add_(3.0)
    batch = collect(ACTIONS["discrete"], ce.TorchPolicy(module, dist="categorical"))
    assert module.training, "the learner's own module is not touched"
    obs, actions, logprobs = flat(batch)
    with torch.no_grad():
        own = Categorical(logits=module.eval()(obs)).log_prob(actions - 2)
    assert torch.allclose(own, logprobs, atol=1e-5)


# -- recurrence and masks ---------------------------------------------------------------------------------------


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(OBS, 8)
        self.head = nn.Linear(8, 4)


def recurrent_dist(module, obs, state, episode_start):
    state = module.cell(obs, state * (1.0 - episode_start)[:, None])
    return Categorical(logits=module.head(state)), state


@pytest.mark.parametrize("workers", [0, 2])
def test_recurrent_state_is_kept_per_slot_and_given_with_the_batch(workers):
    torch.manual_seed(0)
    module = Memory()
    policy = ce.TorchPolicy(module, dist=recurrent_dist, initial_state=lambda rows: torch.zeros(rows, 8))
    with ce.ClusterEnv(
        lambda: Any_(ACTIONS["discrete"]), 5, backend=ce.Local(workers=workers, preload=("torch",))
    ) as envs:
        collector = envs.collector(policy, seed=1)
        batches = [collector.rollout(steps) for steps in (4, 11)]
    assert (batches[0].initial_state == 0).all() and (batches[1].initial_state != 0).any()
    state = torch.zeros(5, 8)
    for batch in batches:
        assert np.allclose(batch.initial_state, state.numpy(), atol=1e-6)
        for t in range(batch.num_steps):
            starts = torch.from_numpy(batch.episode_starts[t]).float()
            with torch.no_grad():
                dist, state = recurrent_dist(module, torch.from_numpy(batch.obs[t]), state, starts)
            own = dist.log_prob(torch.from_numpy(batch.actions[t]) - 2)
            assert np.allclose(own.numpy(), batch.logprobs[t], atol=1e-5)


def test_a_masked_fragment_has_states_too(tmp_path):
    policy = ce.TorchPolicy(Memory(), dist=recurrent_dist, initial_state=lambda rows: torch.zeros(rows, 8))

    def thunk(i):
        env = Any_(ACTIONS["discrete"])
        return DiesOnce(env, tmp_path / "died") if i == 1 else env

    thunks = [lambda i=i: thunk(i) for i in range(4)]
    recovery = ce.Recovery(backoff_s=(0.01, 0.1))
    with ce.ClusterEnv(thunks, backend=TWO, recovery=recovery) as envs:
        collector = envs.collector(policy, seed=1, on_loss="mask")
        collector.rollout(2)
        batch = collector.rollout(4)
    assert not batch.valid[:, :2].any() and batch.valid[:, 2:].all()
    assert batch.initial_state.shape == (4, 8) and (batch.initial_state[:2] == 0).all()


@pytest.mark.parametrize("kind", ["plain", "recurrent"])
def test_an_observation_that_is_not_finite_costs_its_column_whatever_the_policy_makes_of_it(kind, tmp_path):
    """The policy's own output is not finite then, and torch's distributions raise."""

    class Breaks(gym.Wrapper):
        steps = 0

        def step(self, action):
            self.steps += 1
            obs, *rest = super().step(action)
            if self.steps == 3 and not (tmp_path / "broken").exists():
                (tmp_path / "broken").touch()
                obs = obs * np.nan
            return obs, *rest

    def collect_two(wrapper):
        torch.manual_seed(0)
        policy = ce.TorchPolicy(nn.Linear(OBS, 4), dist=lambda module, obs: Categorical(logits=module(obs)))
        if kind == "recurrent":
            policy = ce.TorchPolicy(Memory(), dist=recurrent_dist, initial_state=lambda rows: torch.zeros(rows, 8))
        thunks = [lambda i=i: (wrapper if i == 1 else gym.Wrapper)(Any_(ACTIONS["discrete"])) for i in range(4)]
        recovery = ce.Recovery(backoff_s=(0.01, 0.1))
        with ce.ClusterEnv(thunks, backend=TWO, recovery=recovery) as envs:
            collector = envs.collector(policy, seed=1)
            return collector.rollout(6), collector.rollout(6)

    broken, whole = collect_two(Breaks), collect_two(gym.Wrapper)
    assert broken[0].valid[:, 1].tolist() == [True, True] + [False] * 4
    assert np.isfinite(broken[0].obs).all() and np.isfinite(broken[0].logprobs).all()
    assert broken[1].valid.all() and broken[1].incarnations.tolist() == [0, 1, 0, 0]
    for batch, expected in zip(broken, whole, strict=True):
        for name in ("obs", "actions", "rewards", "logprobs", "valid"):
            mine, its = getattr(batch, name)[:, [0, 2, 3]], getattr(expected, name)[:, [0, 2, 3]]
            assert np.array_equal(mine, its), name


def test_a_state_whose_rows_do_not_come_first_is_refused():
    policy = ce.TorchPolicy(Memory(), dist=recurrent_dist, initial_state=lambda rows: torch.zeros(1, rows, 8))
    refused(policy, r"first axis must be the rows")


class Masked(gym.Env):
    """At step t action t % 4 is forbidden; says so in its infos, or in its observation."""

    action_space = spaces.Discrete(4)

    def __init__(self, in_obs):
        self.in_obs = in_obs
        box = spaces.Box(0, 100, (1,), np.float32)
        self.observation_space = spaces.Dict(x=box, action_mask=spaces.MultiBinary(4)) if in_obs else box

    def _now(self):
        mask = np.ones(4, dtype=np.int8)
        mask[self.t % 4] = 0
        x = np.array([self.t], dtype=np.float32)
        return ({"x": x, "action_mask": mask}, {}) if self.in_obs else (x, {"action_mask": mask})

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._now()

    def step(self, action):
        assert action != self.t % 4, "a forbidden action"
        self.t += 1
        obs, info = self._now()
        return obs, 0.0, self.t == 7, False, info


@pytest.mark.parametrize("in_obs", [True, False])
@pytest.mark.parametrize("dist", ["categorical", "epsilon-greedy"])
def test_masks_rule_actions_out(in_obs, dist):
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 4)

        def forward(self, obs):
            return self.net(obs["x"] if isinstance(obs, dict) else obs)

    module = Logits()
    policy = ce.TorchPolicy(module, dist=dist, action_mask="action_mask", epsilon=0.5)
    with ce.ClusterEnv(lambda: Masked(in_obs), 3, backend=ce.Local(workers=0) if in_obs else TWO) as envs:
        envs.reset(seed=0)
        envs.step(np.full(3, 1))
        collector = envs.collector(policy, seed=1)
        for _ in range(2):
            batch = collector.rollout(20)
            x = batch.obs["x"] if in_obs else batch.obs
            assert (batch.action_masks.argmin(-1) == x[..., 0] % 4).all() and (batch.action_masks.sum(-1) == 3).all()
            if dist == "categorical":
                with torch.no_grad():
                    logits = module.net(torch.from_numpy(x))
                logits[~torch.from_numpy(batch.action_masks)] = -1e9
                own = Categorical(logits=logits).log_prob(torch.from_numpy(batch.actions))
                assert np.allclose(own.numpy(), batch.logprobs, atol=1e-5)
        for _ in range(10):
            envs.step(policy)
        collector.evaluate(episodes=4)


# -- refused ----------------------------------------------------------------------------------------------------


def refused(policy, match, space="discrete", error=ce.PolicyError, workers=0):
    with ce.ClusterEnv(lambda: Any_(ACTIONS[space]), 4, backend=ce.Local(workers=workers)) as envs:
        envs.reset(seed=0)
        with pytest.raises(error, match=match):
            envs.collector(policy).rollout(3)
        obs, *_ = envs.step(envs.action_space.sample())
        assert obs.shape == (4, OBS), "the environments remain usable"
        assert envs.collector(ce.RandomPolicy()).rollout(2).valid.all()


def test_refusals_name_the_cause():
    refused(object(), r"agent=<object object.*expected a torch.nn.Module")
    refused(net(4), "none of the known shapes.*get_action_and_value.*dist=lambda")
    refused(ce.TorchPolicy(net(3), dist="categorical"), r"\(16, 3\).*needs \(16, 4\)")
    refused(ce.TorchPolicy(net(4), dist="normal"), "acts in a Box space")
    refused(ce.TorchPolicy(net(4), dist="gaussian"), "'gaussian' is not known; choose one of")
    refused(ce.TorchPolicy(net(4), dist=lambda m, o: m(o)), "dist returned Tensor")
    refused(ce.TorchPolicy(nn.Linear(OBS + 1, 4), dist="categorical"), "failed on a batch of 16 observations")
    refused(ce.TorchPolicy(net(4), dist=recurrent_dist), "needs both initial_state")
    refused(ce.TorchPolicy(net(4).to(torch.bfloat16), dist=lambda m, o: Categorical(logits=m(o.bfloat16()).float())),
            "cannot travel")  # fmt: skip


def test_nan_logits_are_named_before_they_reach_an_environment():
    module = net(4)
    policy = ce.TorchPolicy(module, dist="categorical")
    with ce.ClusterEnv(lambda: Any_(ACTIONS["discrete"]), 4, backend=TWO) as envs:
        collector = envs.collector(policy, seed=1)
        first = collector.rollout(3)
        with torch.no_grad():
            module[2].bias.fill_(float("nan"))
        with pytest.raises(ce.PolicyError, match=r"output for slot \d is not finite"):
            collector.rollout(3)
        with torch.no_grad():
            module[2].bias.zero_()
        again = collector.rollout(3)
        assert np.array_equal(again.obs[0], first.last_obs), "nothing was stepped in between"


def test_a_changed_architecture_is_refused():
    module = net(4)
    with ce.ClusterEnv(lambda: Any_(ACTIONS["discrete"]), 4, backend=TWO) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1)
        collector.rollout(3)
        module[0], module[2] = nn.Linear(OBS, 20), nn.Linear(20, 4)
        with pytest.raises(ce.PolicyError, match="its architecture changed; make a new collector"):
            collector.rollout(3)
        assert envs.collector(ce.TorchPolicy(module, dist="categorical")).rollout(2).valid.all()


def test_a_module_that_fails_on_the_worker_says_so_with_its_traceback():
    import os

    class OnlyAtHome(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.home = net(4), os.getpid()

        def forward(self, obs):
            if os.getpid() != self.home:
                raise RuntimeError("no such device here")
            return self.net(obs)

    refused(ce.TorchPolicy(OnlyAtHome(), dist="categorical", runtime="torch"), "no such device here", workers=2)


def test_arguments_of_collectors_are_checked():
    with ce.ClusterEnv("CartPole-v1", 2, backend=ce.Local(workers=1)) as envs:
        with pytest.raises(ce.PolicyError, match="no greedy action"):
            envs.collector(ce.RandomPolicy()).evaluate(episodes=2)
        assert envs.collector(ce.RandomPolicy()).evaluate(episodes=2, deterministic=False).mean > 0
        with pytest.raises(ce.SpecError, match="num_steps=0"):
            envs.collector(ce.RandomPolicy()).rollout(0)
        with pytest.raises(ce.SpecError, match="on_loss='drop'"):
            envs.collector(ce.RandomPolicy(), on_loss="drop")


def _fused_step(module):
    module.weight.grad = torch.ones_like(module.weight)
    torch.optim.SGD([module.weight], lr=1.0, fused=True).step()


CHANGES = {
    "in place": lambda module: module.weight.detach().mul_(2),
    "a fused optimizer": _fused_step,
    "through .data": lambda module: module.weight.data.add_(1),
    "through a numpy view": lambda module: module.weight.detach().numpy().__iadd__(1),
    "another tensor": lambda module: setattr(module, "weight", torch.nn.Parameter(module.weight.detach() + 1)),
    "load_state_dict": lambda module: module.load_state_dict({name: w + 1 for name, w in module.state_dict().items()}),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_the_weights_is_published_however_it_was_made(how):
    module = torch.nn.Linear(4, 2)
    with ce.ClusterEnv("CartPole-v1", num_envs=2, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"), seed=1)
        versions = [collector.rollout(4).versions.max()]
        for _ in range(2):
            CHANGES[how](module)
            versions += [collector.publish(), collector.publish(), collector.rollout(4).versions.max()]
    assert versions == [0, 1, 1, 1, 2, 2, 2]
