"""The same script over every backend: only the word after `backend=` differs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import pytest

import real
from namespace_cluster import agent_command, pods

SCRIPT = """
import numpy as np

import clusterenv as ce

BACKEND = {backend}


def forward(weights, obs):
    return obs @ weights["w"]


def main():
    weights = {{"w": np.zeros((4, 2), np.float32)}}
    policy = ce.NumpyPolicy(forward, weights, dist="categorical")
    rng = np.random.default_rng(1)
    best = 0.0
    with ce.ClusterEnv("CartPole-v1", num_envs=8, backend=BACKEND) as envs:
        collector = envs.collector(policy, seed=1)
        kept = weights["w"].copy()
        for _ in range(12):  # hill climbing
            weights["w"][...] = kept + rng.normal(size=(4, 2)).astype(np.float32)
            batch = collector.rollout(64)
            score = batch.valid.sum() / max(1, batch.terminations.sum())
            if score > best:
                best, kept = score, weights["w"].copy()
    print(f"best {{best:.3f}}")


main()
"""


@pytest.mark.parametrize(
    "kind",
    [
        "local",
        pytest.param("manual", marks=pytest.mark.network),
        pytest.param("slurm", marks=[pytest.mark.slurm, pytest.mark.smoke]),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.smoke]),
        pytest.param("kubernetes", marks=[pytest.mark.kubernetes, pytest.mark.smoke]),
    ],
)
def test_only_the_backend_differs(kind, tmp_path):
    keys = tmp_path / "keys"
    if kind == "local":
        backend = "ce.Local(workers=2)"
    elif kind == "manual":
        backend = f"ce.Manual(nodes=2, bind='lo', folder={str(keys)!r}, start_timeout_s=60)"
    elif kind == "slurm":
        backend = f"ce.Slurm(nodes=2, interface='lo', folder={str(keys)!r})"
    elif kind == "ray":
        backend = f"ce.Ray(nodes=2, bind='lo', address={real.running['ray'].address!r})"
    else:
        cluster = pods(real.running["kubernetes"])
        given = {item.name: getattr(cluster, item.name) for item in dataclasses.fields(cluster)}
        backend = f"ce.Kubernetes(**{given!r})"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(backend=backend))
    head = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hands = []
    if kind == "manual":  # somebody reads the lines that it prints, and types them
        deadline = time.monotonic() + 30
        while len(list(keys.glob("*/node-1.key"))) < 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.2)
        hands = [subprocess.Popen(agent_command(path)) for path in sorted(keys.glob("*/node-*.key"))]
    output, errors = head.communicate(timeout=100)
    for hand in hands:
        assert hand.wait(20) == 0
    assert head.returncode == 0, errors
    script.write_text(SCRIPT.format(backend="ce.Local(workers=0)"))
    here = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert "best" in output and output.splitlines()[-1:] == here.stdout.splitlines()[-1:], "the same rows, wherever"
