"""Small policies that the tests share."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn


def net(outputs=4, inputs=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


def nudge(module, size, generator):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def draw(family, params, noise):
    actions, for_env = family.choose(params, noise, {})
    return SimpleNamespace(actions=actions, for_env=for_env, logprobs=family.score(params, noise, actions, {}))
