"""Measure whether throughput follows `envs.scale`. Run by hand, with nothing else running:
`python tests/support/scale_throughput.py`.

Pods have a quarter of a core each, so that four of them fit on a small machine. This is not a test, because it
measures time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

import clusterenv as ce
from kube import KubeCluster
from ledgers import FragmentLedger, nodes_here
from namespace_cluster import pods

SECONDS = 12.0


def main() -> None:
    policy = ce.NumpyPolicy(lambda weights, obs: obs @ weights["w"], {"w": np.ones((8, 4), np.float32)})
    ledger = FragmentLedger()
    with KubeCluster(mounts=[Path(tempfile.gettempdir())]) as cluster:
        backend = pods(cluster, nodes=2, max_nodes=4, cpu=0.25)
        with ce.ClusterEnv("LunarLander-v3", 32, backend=backend) as envs:
            stream = envs.collector(policy, seed=1).stream(32)

            def collect(seconds: float) -> float:
                begin, steps = time.perf_counter(), 0
                while time.perf_counter() - begin < seconds:
                    batch = next(stream)
                    ledger.take(batch)
                    steps += batch.valid.size
                return steps / (time.perf_counter() - begin)

            for nodes in (2, 4, 2, 4, 2):
                envs.scale(nodes=nodes)
                while nodes_here(envs) != nodes:
                    ledger.take(next(stream))
                collect(SECONDS / 3)  # until all slots have moved
                print(f"{nodes} nodes: {collect(SECONDS):,.0f} steps/s", flush=True)
            stream.close()
    print(f"{ledger.moved} slots moved, {sum(ledger.sequence.values())} fragments, none lost or twice")


if __name__ == "__main__":
    main()
