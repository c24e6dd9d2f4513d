"""A training script with a fault, in its own process: the doctor's tests watch it from outside.

`watched(...)` starts it and returns a client of its monitor. Run as a script, this file is the training script.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

WAIT_S = 60.0


class Plain(gym.Env):
    """About 0.2 ms of work per step, 50 steps per episode; what goes wrong is in `fault`, for one slot or all."""

    action_space = spaces.Discrete(2)

    def __init__(self, slot: int, fault: str, amount: float, size: int) -> None:
        self.slot, self.fault, self.amount = slot, fault, amount
        self.observation_space = spaces.Box(-1, 1, (size,), np.float32)
        self.t = 0
        self.kept = []
        self.children = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        if self.fault == "reset":
            time.sleep(self.amount)
        if self.fault == "children" and len(self.children) < self.amount:
            self.children.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        end = time.perf_counter() + 0.0002
        while time.perf_counter() < end:
            pass
        if self.fault == "step":
            time.sleep(self.amount)
        if self.fault == "leak":
            self.kept.append(b"x" * int(self.amount))
        if self.fault == "crash" and self.t == 20:
            raise ValueError(f"joint {self.slot} left its limits")
        if self.fault == "hang" and self.t == 20:
            time.sleep(1000)
        return self._obs(), 0.0, self.t >= 50, False, {}

    def _obs(self):
        return self.np_random.random(self.observation_space.shape, np.float32)


def forward(weights, obs):
    return obs[:, :2] @ weights["w"]


def _main(options: dict) -> None:
    import clusterenv as ce
    from clusterenv.testing import chaos

    count, size, amount = options["envs"], options["size"], options["amount"]
    faults = dict.fromkeys(range(count) if options["slot"] is None else [options["slot"]], options["fault"])
    makers = [lambda i=i: Plain(i, faults.get(i, ""), amount, size) for i in range(count)]
    linked = chaos.LinkedLoopback(nodes=2)
    backend = (
        linked
        if options["link"]
        else ce.Loopback(nodes=2)
        if options["nodes"]
        else ce.Local(workers=options["workers"])
    )
    recovery = ce.Recovery(backoff_s=(0.5, 1.0), max_restarts=1000)
    with ce.ClusterEnv(makers, backend=backend, recovery=recovery, name="watched") as envs:
        if options["call"] == "step":
            envs.reset(seed=1)
            while True:
                envs.step(np.zeros(count, np.int64))
        policy = ce.NumpyPolicy(forward, {"w": np.zeros((2, 2), np.float32)})
        sync = ce.Never() if options["never"] else ce.Always()
        collector = envs.collector(policy, seed=1, sync=sync)
        if options["link"]:
            collector.rollout(32)
            linked.links[1].limit(options["link"], "to_target")
        batches = collector.stream(64) if options["call"] == "stream" else iter(lambda: collector.rollout(64), None)
        for _ in batches:
            policy.values["w"] += np.float32(0.001)
            if options["publish"]:
                collector.publish()
            time.sleep(options["learn_s"])


@contextlib.contextmanager
def watched(home: Path, **options) -> Iterator[object]:
    """Run the script until the end of the block; yield a client of its monitor, once it has made steps."""
    from clusterenv.errors import UsageError
    from clusterenv.monitor.client import Client, find

    defaults = {"envs": 4, "workers": 2, "size": 8, "slot": 1, "fault": "", "amount": 0.0, "call": "rollout"}
    defaults |= {"nodes": False, "link": 0, "never": False, "learn_s": 0.01, "publish": True}
    source = Path(sys.modules["clusterenv"].__file__).parents[1]
    environment = {**os.environ, "CLUSTERENV_HOME": str(home), "PYTHONPATH": f"{source}:{Path(__file__).parent}"}
    command = [sys.executable, __file__, json.dumps({**defaults, **options})]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
    client = None
    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            if client is None:
                with contextlib.suppress(UsageError, OSError):
                    client = Client(find("watched"))
            sample = client.sample() if client is not None else None
            if sample is not None and sample.point.steps:
                break
            assert time.monotonic() < deadline and process.poll() is None, (home / "log").read_text()
            time.sleep(0.2)
        yield client
    finally:
        if client is not None:
            client.close()
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    import watched_run  # so that workers find the class by its module's name

    watched_run._main(json.loads(sys.argv[1]))
