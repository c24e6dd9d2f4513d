"""What bare loops say about an environment, from made-up loops."""

from __future__ import annotations

import numpy as np
import pytest

from clusterenv.bench.bare import summarize
from clusterenv.bench.loop import Loop, Made


def loop(steps: int, cpu_s: float = 1.0, queued_s: float = 0.0, lengths: tuple[int, ...] = ()) -> Loop:
    return Loop(steps, 1.0, cpu_s, queued_s, np.full(5, 1 / steps), len(lengths), 0.01 * len(lengths), list(lengths))


def test_rates_are_medians_and_those_of_loops_at_once_add_up() -> None:
    together = [(loop(800), loop(700)), (loop(900), loop(700)), (loop(10), loop(20))]
    bare = summarize(2, 2, Made(0.1, 5, False), [loop(1000), loop(990), loop(100)], together)
    assert (bare.rate, bare.all_rate) == (990.0, 1500.0)
    assert bare.slowdown == pytest.approx(1.32) and bare.episode_steps is None and bare.reset_share == 0.0


def test_time_that_other_processes_took_is_left_out_and_reported() -> None:
    bare = summarize(1, 1, Made(0.1, 5, False), [loop(500, cpu_s=0.5, queued_s=0.5)], [(loop(500, 0.5, 0.5),)])
    assert bare.rate == 1000.0 and bare.taken_share == 0.5 and bare.cpu_share == 1.0


def test_an_environment_that_sleeps_is_not_taken_for_one_that_waits_for_a_core() -> None:
    bare = summarize(1, 1, Made(0.1, 5, False), [loop(500, cpu_s=0.1)], [(loop(500, cpu_s=0.1),)])
    assert bare.rate == 500.0 and bare.taken_share == 0.0 and bare.cpu_share == 0.1


def test_resets_have_their_share_of_the_time() -> None:
    bare = summarize(1, 1, Made(0.1, 5, False), [loop(100, lengths=(20, 20, 20, 20))], [(loop(100),)])
    assert bare.reset_s == pytest.approx(0.01) and bare.episode_steps == 20.0
    assert bare.reset_share == pytest.approx(0.04)


def test_the_share_of_resets_has_one_clock() -> None:
    """Others had the core for half of the time, of steps and of resets."""
    alone = Loop(100, 2.0, 1.0, 1.0, np.full(5, 0.01), 4, 1.0, [25] * 4)
    bare = summarize(1, 1, Made(0.1, 5, False), [alone], [(alone,)])
    assert bare.reset_share == pytest.approx(0.5)
