"""Small policies shared by tests."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn


def net(outputs=4, inputs=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


def nudge(module, size, generator):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def logprob(name, params, actions, space):
    """Return torch's log-probability of actions under the parameters of a family."""
    d = torch.distributions
    params, actions = torch.from_numpy(params).double(), torch.from_numpy(np.asarray(actions))
    if name == "categorical":
        return d.Categorical(logits=params).log_prob(actions - int(space.start)).numpy()
    if name == "multi-categorical":
        parts = params.split(space.nvec.tolist(), 1)
        return sum(d.Categorical(logits=part).log_prob(actions[:, i]) for i, part in enumerate(parts)).numpy()
    if name == "bernoulli":
        return d.Bernoulli(logits=params).log_prob(actions.double()).sum(1).numpy()
    mean, log_std = params.chunk(2, dim=1)
    dist = d.Normal(mean, log_std.exp())
    if name == "tanh-normal":
        low, high = torch.from_numpy(space.low).double(), torch.from_numpy(space.high).double()
        moves = [d.TanhTransform(), d.AffineTransform((high + low) / 2, (high - low) / 2)]
        dist = d.TransformedDistribution(dist, moves)
    return dist.log_prob(actions.double()).sum(1).numpy()


def draw(family, params, noise):
    actions, for_env = family.choose(params, noise, {})
    return SimpleNamespace(actions=actions, for_env=for_env, logprobs=family.score(params, noise, actions, {}))
