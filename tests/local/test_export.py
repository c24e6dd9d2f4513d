"""The exported forward pass of a torch policy gives what torch gives, whatever the module, the rows and the weights."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal, TanhTransform, TransformedDistribution

import clusterenv as ce
from clusterenv.policy.acting.shapes import pack
from clusterenv.policy.acting.torch_actor import TorchRecipe, to_tensor
from clusterenv.policy.onnx.actor import OnnxRecipe
from clusterenv.rollout import map_arrays

VECTOR = spaces.Box(-3, 3, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 20, 20), np.uint8)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-2.0, 3.0, (2,), np.float32)
ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.LeakyReLU, nn.Softplus, nn.Hardswish]
NORMS = [None, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm, lambda width: nn.GroupNorm(2, width)]
MODULES = [
    functools.partial(nn.Softplus, 2.0, 0.3),
    *(nn.Sigmoid, nn.CELU, lambda: nn.GELU("tanh"), nn.Hardsigmoid, nn.Hardtanh, nn.ReLU6, nn.Softsign, nn.PReLU),
    *(nn.LogSigmoid, nn.Tanhshrink, lambda: nn.Softmax(-1), lambda: nn.LogSoftmax(-1), lambda: nn.ReLU(inplace=True)),
    *(nn.Dropout, nn.Identity, lambda: nn.Threshold(0.1, 2.0), lambda: nn.LayerNorm(8, elementwise_affine=False)),
]


def randomize(module, generator):
    """Give the module other weights: none may be a constant of the graph."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                noise = 0.5 + torch.rand(tensor.shape, generator=generator)
                tensor.copy_(tensor * noise if tensor.any() else noise / 10)


def check(policy, obs_space, action_space, rows=(16, 32, 64)):
    """Export, then compare with torch on other observations and under other weights than the export did."""
    prepared = policy.prepare(obs_space, action_space)
    assert prepared.runtime == "onnx" and isinstance(prepared.recipe, OnnxRecipe)
    in_torch = copy.copy(policy)
    in_torch._runtime = "torch"
    other = in_torch.prepare(obs_space, action_space)
    assert isinstance(other.recipe, TorchRecipe)
    exported, original = prepared.recipe.build(), other.recipe.build()
    generator = torch.Generator().manual_seed(5)
    obs_space.seed(9)
    for count in rows:
        randomize(policy.module, generator)
        weights = {name: np.array(value) for name, value in policy.weights().items()}
        exported.load(weights)
        original.load(weights)
        states = exported.initial_state(count), original.initial_state(count)
        starts = np.ones(count, np.bool_)
        for _ in range(1 if states[0] is None else 4):
            obs = map_arrays(lambda *leaves: np.stack(leaves), *(obs_space.sample() for _ in range(count)))
            ours, after = exported.forward(obs, states[0], starts)
            theirs, after_torch = original.forward(obs, states[1], starts)
            same(ours, theirs)
            map_arrays(lambda a, b: same(a, b.numpy()), after, after_torch)
            states, starts = (after, after_torch), np.arange(count) % 3 == 0
    return prepared


def same(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert np.abs(ours - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())


class Agent(nn.Module):
    """CleanRL's agents: discrete, continuous, and with a shared network, of pixels or not."""

    def __init__(self, body, width, kind):
        super().__init__()
        self.kind = kind
        if kind == "continuous":
            self.actor_mean = nn.Sequential(body, nn.Linear(width, 2))
            self.actor_logstd = nn.Parameter(torch.full((1, 2), -0.5))
        elif kind == "discrete":
            self.actor = nn.Sequential(body, nn.Linear(width, 4))
        else:
            self.network, self.actor = body, nn.Linear(width, 4)

    def get_action_and_value(self, x, action=None):
        if self.kind == "continuous":
            mean = self.actor_mean(x)
            return action, Normal(mean, self.actor_logstd.expand_as(mean).exp()).log_prob(action).sum(1), None, None
        x = x / 255.0 if self.kind == "pixels" else x
        logits = self.actor(x) if self.kind == "discrete" else self.actor(self.network(x))
        return action, Categorical(logits=logits).log_prob(action), None, None


class SAC(nn.Module):
    def __init__(self, body, width):
        super().__init__()
        self.body, self.fc_mean, self.fc_logstd = body, nn.Linear(width, 2), nn.Linear(width, 2)
        self.register_buffer("action_scale", torch.ones(2))

    def forward(self, x):
        x = self.body(x)
        return self.fc_mean(x), -5 + 0.5 * 7 * (torch.tanh(self.fc_logstd(x)) + 1)


@st.composite
def bodies(draw):
    """A multilayer perceptron for VECTOR, and its width."""
    layers, size = [], 5
    norm = draw(st.sampled_from(NORMS))
    for width in draw(st.lists(st.sampled_from([2, 6, 16, 50, 64]), min_size=1, max_size=3)):
        layers += [nn.Linear(size, width, bias=draw(st.booleans()))]
        layers += [] if norm is None else [norm(width)]
        layers += [draw(st.sampled_from(ACTIVATIONS))()]
        size = width
    return nn.Sequential(*layers), size


@st.composite
def convolutions(draw):
    """A convolutional network for IMAGE, and its width."""
    layers, channels, side = [], 3, 20
    for _ in range(draw(st.integers(1, 2))):
        out, kernel, stride, padding = draw(st.sampled_from([(4, 3, 1, 0), (8, 4, 2, 1), (6, 3, 2, 1)]))
        layers += [nn.Conv2d(channels, out, kernel, stride, padding)]
        layers += draw(st.sampled_from([[], [nn.BatchNorm2d(out)], [nn.GroupNorm(2, out)]]))
        layers += [draw(st.sampled_from(ACTIVATIONS[:4]))()]
        channels, side = out, (side + 2 * padding - kernel) // stride + 1
    pool = draw(st.sampled_from([None, nn.MaxPool2d, nn.AvgPool2d]))
    if pool is not None:
        layers, side = [*layers, pool(2)], side // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, 16), nn.ReLU()), 16


quick = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@quick
@given(body=bodies(), kind=st.sampled_from(["discrete", "continuous", "network", "sac", "categorical", "normal", "q"]))
def test_a_network_of_any_shape_is_exported(body, kind):
    body, width = body
    if kind == "sac":
        check(ce.TorchPolicy(SAC(body, width), runtime="onnx"), VECTOR, BOX)
    elif kind in ("discrete", "continuous", "network"):
        policy = ce.TorchPolicy(Agent(body, width, kind), runtime="onnx")
        check(policy, VECTOR, BOX if kind == "continuous" else DISCRETE)
    else:
        name = "epsilon-greedy" if kind == "q" else kind
        module = nn.Sequential(body, nn.Linear(width, 4))
        check(ce.TorchPolicy(module, dist=name, runtime="onnx"), VECTOR, BOX if kind == "normal" else DISCRETE)


@settings(quick, max_examples=6)
@given(body=convolutions())
def test_a_convolutional_network_of_pixels_is_exported(body):
    prepared = check(ce.TorchPolicy(Agent(*body, "pixels"), runtime="onnx"), IMAGE, DISCRETE, rows=(16, 32))
    assert prepared.description.startswith("CleanRL pixels")


@pytest.mark.parametrize("make", MODULES, ids=lambda make: getattr(make, "__name__", "other"))
def test_a_layer_is_exported(make):
    module = nn.Sequential(nn.Linear(5, 8), make(), nn.Linear(8, 4))
    check(ce.TorchPolicy(module, dist="categorical", runtime="onnx"), VECTOR, DISCRETE)


class Memory(nn.Module):
    def __init__(self, kind, layers, cell=False):
        super().__init__()
        self.rnn = kind(5, 7) if cell else kind(5, 7, layers)
        self.head, self.cell = nn.Linear(7, 4), cell

    def dist(self, obs, state, start):
        if self.cell:
            state = self.rnn(obs, state * (1 - start[:, None]))
            return Categorical(logits=self.head(state)), state
        state = tuple((part * (1 - start).view(-1, 1, 1)).transpose(0, 1).contiguous() for part in state)
        out, state = self.rnn(obs.unsqueeze(0), state if len(state) == 2 else state[0])
        state = state if isinstance(state, tuple) else (state,)
        return Categorical(logits=self.head(out[0])), tuple(part.transpose(0, 1) for part in state)


def recurrent(module, initial, **options):
    return ce.TorchPolicy(module, dist=lambda m, o, s, e: m.dist(o, s, e), initial_state=initial, **options)


@settings(quick, max_examples=6)
@given(kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]), layers=st.integers(1, 2), value=st.sampled_from([0.0, 0.5]))
def test_a_recurrent_policy_is_exported_with_its_state(kind, layers, value):
    parts = 2 if kind is nn.LSTM else 1
    policy = recurrent(
        Memory(kind, layers),
        lambda rows: tuple(torch.full((rows, layers, 7), value) for _ in range(parts)),
        runtime="onnx",
    )
    check(policy, VECTOR, DISCRETE)


def test_a_cell_and_a_state_that_is_one_tensor():
    check(recurrent(Memory(nn.GRUCell, 1, True), lambda rows: torch.ones(rows, 7), runtime="onnx"), VECTOR, DISCRETE)


DISTS = {
    "categorical": (DISCRETE, 4, lambda m, o: Categorical(logits=m(o))),
    "probabilities": (DISCRETE, 4, lambda m, o: Categorical(probs=m(o).softmax(-1))),
    "multi": (
        spaces.MultiDiscrete([3, 2, 4]),
        9,
        lambda m, o: [Categorical(logits=part) for part in m(o).split([3, 2, 4], dim=1)],
    ),
    "bernoulli": (spaces.MultiBinary(3), 3, lambda m, o: Independent(Bernoulli(probs=m(o).sigmoid()), 1)),
    "normal": (BOX, 2, lambda m, o: Independent(Normal(m(o), torch.full((2,), 0.7).expand(len(o), 2)), 1)),
    "number": (BOX, 2, lambda m, o: Normal(m(o), 0.5)),
    "tanh": (BOX, 4, lambda m, o: TransformedDistribution(Normal(m(o)[:, :2], m(o)[:, 2:].exp()), [TanhTransform()])),
}


@pytest.mark.parametrize("name", DISTS)
def test_a_dist_function_is_exported(name):
    action_space, outputs, dist = DISTS[name]
    module = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, outputs))
    check(ce.TorchPolicy(module, dist=dist, runtime="onnx"), VECTOR, action_space)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64"])
def test_observations_are_converted_as_torch_gets_them(dtype):
    module = nn.Linear(5, 4)
    policy = ce.TorchPolicy(module, dist=lambda m, o: Categorical(logits=m(o.float() / 10)), runtime="onnx")
    check(policy, spaces.Box(0, 100, (5,), np.dtype(dtype)), DISCRETE)


class Mixed(nn.Module):
    """Reads three of the four parts of an observation."""

    def __init__(self):
        super().__init__()
        self.image, self.room, self.out = nn.Linear(3 * 4 * 4, 8), nn.Embedding(6, 8), nn.Linear(19, 4)

    def forward(self, obs):
        image = self.image(obs["image"].flatten(1) / 255.0)
        return self.out(torch.cat([image, self.room(obs["room"]), obs["pair"][1]], dim=1))


def test_observations_of_several_parts():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (3, 4, 4), np.uint8),
        mask=spaces.MultiBinary(4),
        pair=spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,))]),
        room=spaces.Discrete(6),
    )
    check(ce.TorchPolicy(Mixed(), dist="categorical", action_mask="mask", runtime="onnx"), space, DISCRETE)


@pytest.mark.parametrize(
    ("policy", "obs_space", "action_space"),
    [
        ("MlpPolicy", VECTOR, DISCRETE),
        ("MlpPolicy", VECTOR, BOX),
        ("MlpPolicy", VECTOR, spaces.MultiDiscrete([3, 2])),
        ("MlpPolicy", VECTOR, spaces.MultiBinary(3)),
        ("MlpPolicy", spaces.Discrete(7), DISCRETE),
        ("CnnPolicy", spaces.Box(0, 255, (3, 36, 36), np.uint8), DISCRETE),
        ("MultiInputPolicy", spaces.Dict(a=VECTOR, b=spaces.Box(0, 255, (3, 36, 36), np.uint8)), BOX),
    ],
)
def test_stable_baselines3s_policies_are_exported(policy, obs_space, action_space):
    from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy

    kinds = {
        "MlpPolicy": ActorCriticPolicy,
        "CnnPolicy": ActorCriticCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticPolicy,
    }
    assert PPO.policy_aliases[policy] is kinds[policy]
    # Without an optimizer, for which torch would import its compiler.
    module = kinds[policy](obs_space, action_space, lambda _: 1e-3, optimizer_class=lambda *_, **__: None)
    check(ce.TorchPolicy(module, runtime="onnx"), obs_space, action_space, rows=(16,))


# -- the number of rows, and the place of a row, do not matter ------------------------------------------------


def cnn():
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 4))


def mlp(size, width, activation=nn.Tanh):
    return nn.Sequential(
        nn.Linear(size, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 4)
    )


@pytest.mark.parametrize(
    ("module", "space"),
    [
        (mlp(4, 64), spaces.Box(-1, 1, (4,))),
        (mlp(17, 100, nn.GELU), spaces.Box(-1, 1, (17,))),
        (mlp(376, 256, nn.ReLU), spaces.Box(-1, 1, (376,))),
        (mlp(8, 512), spaces.Box(-1, 1, (8,))),
        (cnn(), spaces.Box(0, 255, (4, 84, 84), np.uint8)),
    ],
    ids=["4-64", "17-100", "376-256", "8-512", "nature"],
)
def test_a_rows_result_is_bit_identical_in_every_batch(module, space):
    policy = ce.TorchPolicy(module, dist="categorical", runtime="onnx")
    actor = policy.prepare(space, DISCRETE).recipe.build()
    actor.load(policy.weights())
    space.seed(3)
    obs = np.stack([space.sample() for _ in range(64)])
    alone = actor.forward(obs[:16], None, None)[0]
    assert len(np.unique(alone, axis=0)) == 16, "rows differ, so a mix-up would be seen"
    rng = np.random.default_rng(1)
    for rows in (32, 48, 64):
        order = rng.permutation(rows)
        batch = actor.forward(obs[:rows][order], None, None)[0]
        assert np.array_equal(batch[np.argsort(order)[:16]], alone)


def test_pack_is_what_the_comparison_above_uses():
    """The torch actor of `check` is the reference: it must itself give what the module gives."""
    module = SAC(nn.Linear(5, 3), 3)
    policy = ce.TorchPolicy(module, runtime="torch")
    actor = policy.prepare(VECTOR, BOX).recipe.build()
    actor.load(policy.weights())
    obs = np.stack([VECTOR.sample() for _ in range(16)])
    with torch.no_grad():
        assert np.allclose(actor.forward(obs, None, None)[0], pack(module(to_tensor(obs))).numpy(), atol=1e-6)
