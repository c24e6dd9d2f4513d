"""Measure fragments of Atari frames over a network: `python -m benchmarks.pixels [--rounds R] [--json FILE]`.

Two clusters run side by side, one that compresses as it decides itself and one that never does; they collect in turn,
one rollout after the other, so that a busy machine slows both. The links: loopback, loopback with compress=True, and
two network namespaces (needs root), limited to 1 Gbit/s by `tc tbf` and not limited. Two sources of the same frames:
the simulator itself (`simulated`), and recorded frames of it (`replayed`), because the simulator may be slower than the
link. Both are real frames of random play with Gymnasium's Atari preprocessing, in stacks of four 84x84 frames.
Needs `ale-py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import clusterenv as ce

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from namespace_cluster import Namespaces  # type: ignore[import-not-found]
from netns import Network  # type: ignore[import-not-found]

GAMES = ("Pong", "Breakout")
GIGABIT = 125e6
NUM_ENVS, WORKERS, STEPS = 32, 2, 32
FORCED = "loopback, compress=True"
STACK = 4
RECORDED = 6000
"""Frames of each game that are recorded."""


def make_atari(game: str) -> gym.Env[Any, Any]:
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make(f"ALE/{game}-v5", frameskip=1)
    return FrameStackObservation(AtariPreprocessing(env, frame_skip=4, screen_size=84), STACK)


class Replayed(gym.Env[Any, Any]):
    """Returns recorded frames: fast enough to fill any link. Each episode begins with a stack of its first frame.

    The first one begins anywhere: environments that returned the same frames would compress too well.
    """

    observation_space = spaces.Box(0, 255, (STACK, 84, 84), np.uint8)
    action_space: spaces.Space[Any] = spaces.Discrete(4)

    def __init__(self, folder: str) -> None:
        self._frames = np.load(Path(folder, "frames.npy"), mmap_mode="r")
        self._episodes = np.load(Path(folder, "episodes.npy"))
        self._at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self._at = int(self.np_random.integers(len(self._episodes)))
        self._begin, self._end = self._episodes[self._at].tolist()
        if seed is not None:
            self._begin += int(self.np_random.integers(self._end - self._begin - STACK))
        self._at = (self._at + 1) % len(self._episodes)
        return self._frames[self._begin : self._begin + STACK], {}

    def step(self, action: Any) -> Any:
        self._begin += 1
        obs = self._frames[self._begin : self._begin + STACK]
        return obs, 0.0, self._begin + STACK >= self._end, False, {}


def record(game: str, folder: Path) -> None:
    """Write the frames of random play, one episode after the other, and where each begins and ends."""
    env, rng = make_atari(game), np.random.default_rng(0)
    actions = int(env.action_space.n)  # type: ignore[attr-defined]
    frames: list[Any] = []
    episodes: list[tuple[int, int]] = []
    while len(frames) < RECORDED:
        begin, is_over = len(frames), False
        frames += list(env.reset(seed=int(rng.integers(1 << 30)))[0])
        while not is_over and len(frames) < RECORDED:
            obs, _, terminated, truncated, _ = env.step(int(rng.integers(actions)))
            frames.append(obs[-1])
            is_over = terminated or truncated
        episodes.append((begin, len(frames)))
    folder.mkdir()
    np.save(folder / "frames.npy", np.stack(frames))
    np.save(folder / "episodes.npy", np.array(episodes))


@contextmanager
def opened(make: Any, link: str, compress: Any) -> Iterator[ce.Collector]:
    with ExitStack() as stack:
        if link == "loopback":
            backend: Any = ce.Loopback(nodes=1, workers_per_node=WORKERS, compress=compress)
        else:
            net = stack.enter_context(Network(nodes=1))
            times = {"heartbeat_s": (1.0, 10.0, 60.0)}
            backend = Namespaces(net, workers_per_node=WORKERS, compress=compress, **times)
            if link == "1 Gbit/s":
                net.nodes[0].limit(GIGABIT, "out")
        envs = stack.enter_context(ce.ClusterEnv(make, NUM_ENVS, backend=backend))
        envs.reset(seed=1)
        yield envs.collector(ce.RandomPolicy(), seed=1)


def measure(make: Any, link: str, rounds: int) -> dict[str, Any]:
    compress, link = (True, "loopback") if link == FORCED else ("auto", link)
    with opened(make, link, compress) as auto, opened(make, link, False) as plain:
        for collector in (auto, plain):
            for _ in range(4):  # the first fragments measure the link
                collector.rollout(STEPS, copy=False)
        ratios, seconds = [], {auto: 0.0, plain: 0.0}
        before = auto.stats()
        for round_ in range(rounds):
            taken = {}
            for collector in (auto, plain) if round_ % 2 else (plain, auto):
                begin = time.perf_counter()
                collector.rollout(STEPS, copy=False)
                taken[collector] = time.perf_counter() - begin
                seconds[collector] += taken[collector]
            ratios.append(taken[plain] / taken[auto])
        stats = auto.stats()
        transitions = STEPS * NUM_ENVS * rounds
        raw, sent = ((stats[name] - before[name]) / transitions for name in ("fragment_bytes", "fragment_bytes_sent"))
        return {
            "bytes_raw": raw,
            "bytes_sent": sent,
            "fewer_bytes": raw / sent,
            "per_s": transitions / seconds[auto],
            "per_s_uncompressed": transitions / seconds[plain],
            "throughput": seconds[plain] / seconds[auto],
            "throughput_median": median(ratios),
            "form": stats["nodes"][0]["compression"]["observation"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rollouts of each cluster")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", nargs="+", default=None, help="links or sources to measure")
    options = parser.parse_args()
    links = ["loopback", FORCED, *(["1 Gbit/s", "no limit"] if os.geteuid() == 0 else [])]
    found = []
    print("| game | frames | link | bytes raw | sent | fewer | per s | uncompressed | ratio | median | form |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for game in GAMES:
            path = Path(folder, game)
            record(game, path)
            sources = {"replayed": partial(Replayed, str(path)), "simulated": partial(make_atari, game)}
            for source, make in sources.items():
                for link in links:
                    if options.only is not None and not {game, source, link}.intersection(options.only):
                        continue
                    row = measure(make, link, options.rounds if source == "replayed" else max(2, options.rounds // 4))
                    found.append({"game": game, "frames": source, "link": link, **row})
                    print(
                        f"| {game} | {source} | {link} | {row['bytes_raw']:,.0f} | {row['bytes_sent']:,.0f} | "
                        f"{row['fewer_bytes']:.1f} | {row['per_s']:,.0f} | {row['per_s_uncompressed']:,.0f} | "
                        f"{row['throughput']:.2f} | {row['throughput_median']:.2f} | {row['form']} |",
                        flush=True,
                    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
