"""Measure the environment in bare loops, on one core and on all of them at once.

The loops run in the workers of a `ClusterEnv` (`loop.py`), by `call`: crashes, output and the end of processes are then
handled as in any run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from clusterenv.backends import Local
from clusterenv.bench.data import Bare
from clusterenv.bench.loop import BareLoop, Loop, Made
from clusterenv.env import ClusterEnv

__all__ = ["measure_bare", "summarize"]


def measure_bare(
    make: Callable[[], Any], cores: int, processes: int, seconds: float, say: Callable[[str], None]
) -> Bare:
    """Run loops in one worker and in `processes` workers, in turns, for about this long in all."""
    rounds = 3
    window_s = seconds / rounds / 2
    maker = functools.partial(BareLoop, make)
    with ClusterEnv([maker] * processes, backend=Local(workers=processes)) as envs:
        made: Made = envs.call("made", slots=[0])[0]
        say("bare loops")
        envs.call("loop", window_s / 4)  # warms up; draws the actions
        alone: list[Loop] = []
        together: list[Sequence[Loop]] = []
        for _ in range(rounds):
            alone += envs.call("loop", window_s, slots=[0])
            together.append(envs.call("loop", window_s) if processes > 1 else alone[-1:])
    return summarize(cores, processes, made, alone, together)


def summarize(
    cores: int, processes: int, made: Made, alone: Sequence[Loop], together: Sequence[Sequence[Loop]]
) -> Bare:
    rates = [_rate(loop) for loop in alone]
    all_rates = [sum(map(_rate, loops)) for loops in together]
    every = [*alone, *(loop for loops in together for loop in loops)]
    lengths = [length for loop in every for length in loop.lengths]
    resets = sum(loop.resets for loop in alone)
    return Bare(
        cores=cores,
        processes=processes,
        rate=median(rates),
        all_rate=median(all_rates),
        step_s=tuple(np.concatenate([loop.step_s for loop in alone]).tolist()),
        reset_s=sum(loop.reset_s for loop in alone) / resets if resets else 0.0,
        # Both with the time that others took: it is known for whole loops only.
        reset_share=sum(loop.reset_s for loop in alone) / sum(loop.elapsed_s for loop in alone),
        episode_steps=float(np.mean(lengths)) if lengths else None,
        cpu_share=median((loop.cpu_s + loop.queued_s) / loop.elapsed_s for loop in alone),
        taken_share=sum(loop.queued_s for loop in alone) / sum(loop.elapsed_s for loop in alone),
        make_s=made.make_s,
        memory_bytes=made.memory_bytes,
        is_single=made.is_single,
    )


def _rate(loop: Loop) -> float:
    """Return the steps per second without the time in which other processes had the core.

    There are no more loops than cores, so they do not wait for each other.
    """
    return loop.steps / max(loop.elapsed_s - loop.queued_s, 0.1 * loop.elapsed_s)
