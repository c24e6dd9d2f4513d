"""`python -m experiments.wallclock`: what an update takes where links are slow. Needs root, and a quiet machine.

The machines are network namespaces, as in the network tests: real agents, real sockets, links that the kernel limits.
Rules take turns, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clusterenv as ce
from experiments.__main__ import DATA, about
from experiments.ppo import PPO

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from clusters import Namespaces  # type: ignore[import-not-found]

from netns import Network  # type: ignore[import-not-found]

NODES, NUM_ENVS = 2, 64
HIDDEN = 512
"""The actor has 270,000 parameters then: 1.1 MB as fp32."""
LINKS = (12.5e6, 1.25e6, 0.25e6)
"""Bytes a second in each direction: 100, 10 and 2 Mbit/s."""
RULES: dict[str, dict[str, Any]] = {
    "Always fp32": {"sync": ce.Always(), "codec": "fp32"},
    "Always auto": {"sync": ce.Always(), "codec": "auto"},
    "APS() auto": {"sync": ce.APS(), "codec": "auto"},
}


def measure(link: float, rule: str, updates: int) -> dict[str, Any]:
    """The mean update of one short run, and the bytes that it sent to each node."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    with Network(NODES) as net:
        for node in net.nodes:
            node.limit(link)
        # The tests' own heartbeat is too quick: a frame of weights takes longer than its silence on the slowest link.
        backend = Namespaces(net, heartbeat_s=ce.Manual.heartbeat_s)
        with ce.ClusterEnv("LunarLander-v3", NUM_ENVS, backend=backend) as cluster:
            spaces = cluster.single_observation_space, cluster.single_action_space
            learner = PPO(*spaces, 600_000, hidden=HIDDEN, epochs=4, minibatch=512, entropy=0.01)
            collector = cluster.collector(learner.policy, seed=1, **RULES[rule])
            # The first carries the policy itself.
            learner.learn(collector.rollout(learner.num_steps), collector.publish)
            before, spent = sum(cluster.stats()["sent_bytes"]), []
            for _ in range(updates):
                begin = time.perf_counter()
                learner.learn(collector.rollout(learner.num_steps), collector.publish)
                spent.append(time.perf_counter() - begin)
            sent = (sum(cluster.stats()["sent_bytes"]) - before) / NODES / updates
            pulls = collector.stats()["pulls"] / NODES - 1
    return {
        "link": link,
        "rule": rule,
        "mean_s": round(float(np.mean(spent)), 3),
        "kB_per_update": round(sent / 1e3, 1),
        "updates_per_pull": round(updates / max(pulls, 1), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.wallclock", description=__doc__)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA / "wallclock.jsonl")
    args = parser.parse_args()
    lines = []
    for number in range(args.rounds):
        for link in LINKS:
            for rule in RULES:
                lines.append({"round": number, **measure(link, rule, args.updates), **about()})
                print(lines[-1], file=sys.stderr, flush=True)
    args.data.write_text("".join(json.dumps(line) + "\n" for line in lines))  # at the end: an older file is not lost
    return 0


if __name__ == "__main__":
    sys.exit(main())
