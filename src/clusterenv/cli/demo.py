"""`clusterenv demo`: rollouts of a random policy, with a worker that is killed on the way."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

__all__ = ["run_demo"]


def run_demo(env: str, seconds: float) -> int:
    """Collect for this long, kill a worker in the middle, and print rates and events. Return the exit code."""
    import clusterenv as ce

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with ce.ClusterEnv(env, num_envs=32, name="demo") as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        pids = envs.stats()["worker_pids"]
        print(f"32 x {env} in {len(pids)} worker processes. In another terminal: clusterenv top demo", flush=True)
        began = shown = time.monotonic()
        victim = pids[-1]
        while (now := time.monotonic()) - began < seconds:
            collector.rollout(128)
            if now - shown >= 2.0:
                shown = now
                numbers = collector.summary()
                rate, returns = numbers["collect/steps_per_s"], numbers["charts/episodic_return"]
                print(f"{now - began:5.0f} s  {rate:10,.0f} steps/s  mean return {returns:.1f}", flush=True)
            if victim is not None and now - began > seconds / 2:
                print(f"killing worker process {victim}", flush=True)
                os.kill(victim, signal.SIGKILL)
                victim = None
        stats = collector.stats()
        print(f"{stats['steps']:,} steps, {stats['episodes']:,} episodes, {stats['restarts']} worker restarted")
    return 0
