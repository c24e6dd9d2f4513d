"""What `clusterenv bench` decides, from made-up measurements."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterenv.bench import advise
from clusterenv.bench.data import Bare, Choice, Compared, HeadCost, Point, Rates, Shares, Space
from clusterenv.bench.model import Coefficients, Model, crowding, fit, lockstep_loss, non_negative_fit
from clusterenv.bench.notes import duration, make_notes, worthwhile_cores

PLENTY = 64 << 30


def bare(row_s: float = 10e-6, cores: int = 4, slowdown: float = 1.0, cpu_share: float = 1.0) -> Bare:
    rate = 1 / row_s
    return Bare(
        cores, cores, rate, rate * cores / slowdown, (row_s,) * 8, row_s, 0.01, 100.0, cpu_share, 0.0, 1e-3, 1 << 20
    )


def model(row_s: float, cores: int = 4, *, cpu_share: float = 1.0, **rest: float) -> Model:
    of = Coefficients(**{"environment": row_s, **dict.fromkeys(("policy_call", "policy_row"), 0.0), **rest})
    return Model(bare(row_s, cores, cpu_share=cpu_share), of, of)


def measured(of: Model, points: tuple[Point, ...]) -> tuple[Rates, ...]:
    """Return what a machine that behaves exactly like this model would show."""
    found = []
    for point in points:
        c, rate = of.rollout, of.rate("rollout", point)
        seconds, crowd = point.num_envs / rate, crowding(of.bare, point.workers)
        environment = crowd * point.envs * c.environment / seconds
        policy = crowd * (c.policy_call + point.envs * c.policy_row) / seconds
        shares = Shares(environment, policy, 0.0, 1 - environment - policy)
        found.append(Rates(point, (rate,) * 3, (of.rate("step", point),) * 3, shares))
    return tuple(found)


def recommended(of: Model, max_workers: int | None = None) -> Point:
    """Run all decisions of the command, on a machine without noise."""
    possible = advise.space(of.bare, max_workers, 30.0, PLENTY)
    explored = measured(of, advise.exploration(possible))
    fitted = fit(of.bare, explored)
    points = advise.candidates(fitted, possible, explored, "rollout", most=4)
    return advise.choose("rollout", measured(of, points), of.bare.all_rate).point


@pytest.mark.parametrize(
    ("what", "of", "workers"),
    [
        ("free, and each worker costs more than it does", model(0.1e-6, fixed=0, per_worker=1e-3, per_row=0), 1),
        ("free, and the head's work per row is everything", model(0.1e-6, fixed=0, per_worker=0, per_row=50e-6), 1),
        ("expensive", model(5e-3, fixed=20e-6, per_worker=20e-6, per_row=1e-6), 4),
        ("expensive, on many cores", model(5e-3, 96, fixed=20e-6, per_worker=20e-6, per_row=1e-6), 96),
        ("mostly asleep", model(5e-3, 2, cpu_share=0.125, fixed=20e-6, per_worker=1e-6, per_row=1e-6), 16),
    ],
)
def test_the_number_of_workers_follows_the_cost_of_the_environment(what: str, of: Model, workers: int) -> None:
    assert recommended(of).workers == workers


def test_a_policy_call_shared_by_many_environments_asks_for_many() -> None:
    costly = model(5e-6, fixed=50e-6, per_worker=5e-6, per_row=0.1e-6, policy_call=100e-6)
    cheap = model(500e-6, fixed=50e-6, per_worker=5e-6, per_row=0.1e-6)
    assert recommended(costly).envs >= 32 > recommended(cheap).envs


def test_workers_given_by_the_user_are_the_most() -> None:
    expensive = model(5e-3, 16, fixed=0, per_worker=0, per_row=0)
    assert recommended(expensive, max_workers=3).workers == 3


seconds = st.floats(1e-7, 1e-2)


@given(seconds, st.integers(1, 200), st.floats(1.0, 4.0), st.floats(0.01, 3.0), seconds, seconds, seconds, seconds)
def test_any_machine_gets_a_possible_recommendation_close_to_the_best(
    row_s: float, cores: int, slowdown: float, cpu: float, call: float, fixed: float, per_worker: float, per_row: float
) -> None:
    of = Coefficients(row_s, call, row_s / 10, fixed, per_worker, per_row)
    exact = Model(bare(row_s, cores, slowdown, cpu), of, of)
    point = recommended(exact)
    possible = advise.space(exact.bare, None, 30.0, PLENTY)
    assert point in possible.points and point.workers <= point.num_envs
    best = max(exact.rate("rollout", other) for other in possible.points)
    assert exact.rate("rollout", point) >= 0.9 * best


@given(seconds, st.integers(1, 200), st.floats(1.0, 4.0), st.floats(0.01, 3.0))
def test_more_workers_never_make_one_of_them_faster(row_s: float, cores: int, slowdown: float, cpu: float) -> None:
    crowd = [crowding(bare(row_s, cores, slowdown, cpu), workers) for workers in range(1, 2 * cores + 2)]
    assert crowd[0] == 1.0 and all(a <= b + 1e-12 for a, b in itertools.pairwise(crowd))


@given(st.lists(seconds, min_size=6, max_size=6), st.integers(2, 64))
def test_the_model_predicts_more_for_more_environments_and_more_for_cheaper_ones(of: list[float], cores: int) -> None:
    coefficients = Coefficients(*of)
    exact = Model(bare(coefficients.environment, cores), coefficients, coefficients)
    dearer = replace(coefficients, environment=2 * coefficients.environment)
    for workers in (1, cores):
        rates = [exact.rate("rollout", Point(workers, envs)) for envs in (1, 2, 4, 8, 64)]
        assert rates == sorted(rates)
        assert replace(exact, rollout=dearer).rate("rollout", Point(workers, 8)) <= rates[3]


def test_the_model_finds_the_coefficients_of_a_machine_without_noise() -> None:
    exact = model(20e-6, 8, policy_call=40e-6, policy_row=1e-6, fixed=100e-6, per_worker=8e-6, per_row=0.5e-6)
    possible = advise.space(exact.bare, None, 30.0, PLENTY)
    fitted = fit(exact.bare, measured(exact, advise.exploration(possible)))
    for point in possible.points:
        for mode in ("rollout", "step"):
            assert fitted.rate(mode, point) == pytest.approx(exact.rate(mode, point), rel=0.1)


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=3, max_size=8), st.data())
def test_a_fit_is_never_negative_and_no_worse_than_any_other(rows: list[list[float]], data: st.DataObject) -> None:
    features = np.array(rows)
    values = np.array(data.draw(st.lists(st.floats(0, 10), min_size=len(rows), max_size=len(rows))))
    scale = np.ones(len(rows))
    found = np.array(non_negative_fit(features, values, scale))
    other = np.array(data.draw(st.lists(st.floats(0, 5), min_size=3, max_size=3)))
    assert (found >= 0).all()
    assert np.linalg.norm(features @ found - values) <= np.linalg.norm(features @ other - values) + 1e-2


def rounds(**rates: list[float]) -> tuple[Rates, ...]:
    """Return measurements from keywords such as w2e8=[...]."""
    named = {Point(*map(int, name[1:].split("e"))): values for name, values in rates.items()}
    return tuple(Rates(point, tuple(values)) for point, values in named.items())


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"w1e8": [99.0, 101, 98, 100], "w2e8": [100.0, 100, 101, 99]}, Point(1, 8)),
        ({"w1e8": [80.0, 82, 79, 81], "w2e8": [100.0, 100, 101, 99]}, Point(2, 8)),
        # The machine became half as fast in the middle: within each round, two workers are still far ahead.
        ({"w1e8": [80.0, 80, 40, 40], "w2e8": [100.0, 100, 50, 50]}, Point(2, 8)),
        # A single bad round does not decide.
        ({"w1e8": [80.0, 80, 81, 80, 79], "w2e8": [100.0, 20, 100, 100, 99]}, Point(2, 8)),
        ({"w2e4": [98.0, 99, 99], "w2e64": [100.0, 100, 100], "w4e64": [90.0, 90, 90]}, Point(2, 4)),
        # However noisy, a tenth is not given away.
        ({"w1e8": [90.0, 60, 130, 40, 90], "w2e8": [100.0, 100, 100, 100, 100]}, Point(2, 8)),
    ],
)
def test_the_smallest_candidate_within_the_noise_is_chosen(rates: dict[str, list[float]], expected: Point) -> None:
    choice = advise.choose("rollout", rounds(**rates), all_rate=200.0)
    assert choice.point == expected and choice.of_limit == choice.rate / 200.0


@given(
    st.dictionaries(
        st.builds(Point, st.integers(1, 8), st.integers(1, 64)),
        st.lists(st.floats(1, 1e6), min_size=4, max_size=4),
        min_size=1,
    )
)
def test_a_choice_is_one_of_the_candidates_and_nearly_as_fast_as_the_fastest(of: dict[Point, list[float]]) -> None:
    choice = advise.choose("step", [Rates(point, step=tuple(rates)) for point, rates in of.items()], 1.0)
    assert choice.point in of and choice.ratio_to_best >= 0.95


@pytest.mark.parametrize(
    ("change", "largest", "why"),
    [
        ({}, 64, ""),
        ({"memory_bytes": 1 << 30}, 2, "memory"),
        ({"make_s": 0.2}, 4, "the time to make them"),
        ({"rate": 1 / 10e-3}, 4, "the time of a step"),
        ({"is_single": True}, 1, "one environment per process"),
        ({"rate": 0.1}, 1, "the time of a step"),
        ({"memory_bytes": 1 << 40}, 1, "memory"),
    ],
)
def test_environments_per_worker_stay_within_memory_and_time(change: dict[str, float], largest: int, why: str) -> None:
    possible = advise.space(replace(bare(), **change), None, 30.0, PLENTY)  # type: ignore[arg-type]
    assert (possible.envs[-1], possible.envs_limit) == (largest, why)


@pytest.mark.parametrize(
    ("change", "available", "given", "most", "why"),
    [
        ({}, PLENTY, None, 64, ""),
        ({"memory_bytes": 1 << 30}, PLENTY, None, 8, "memory"),
        ({"memory_bytes": 1 << 30}, PLENTY, 4, 4, ""),
        ({"memory_bytes": 20 << 20}, 0, None, 1, "memory"),
        ({"make_s": 5.0}, PLENTY, None, 64, ""),  # made at the same time
        ({"cpu_share": 0.05}, PLENTY, None, 512, ""),
        ({"cpu_share": 0.05, "make_s": 0.2}, PLENTY, None, 256, "the time to make them"),
        ({"cpu_share": 0.05, "make_s": 5.0}, PLENTY, None, 64, "the time to make them"),
        ({"cpu_share": 0.05, "make_s": 5.0}, PLENTY, 100, 100, ""),
    ],
)
def test_workers_stay_within_memory_and_time(
    change: dict[str, float], available: int, given: int | None, most: int, why: str
) -> None:
    of = replace(bare(1e-3, cores=64), **change)  # type: ignore[arg-type]
    possible = advise.space(of, given, 30.0, available)
    assert (possible.workers[-1], possible.workers_limit) == (most, why)
    if of.make_s * possible.workers[-1] / 64 < 1.0:
        made_s = possible.workers[-1] * possible.envs[-1] * of.make_s / 64
        assert made_s < 1.0, "of 30 s"


@given(st.integers(1, 512), st.floats(1e-7, 10.0), st.integers(0, 1 << 38))
def test_the_explored_points_are_possible_and_few(cores: int, row_s: float, available: int) -> None:
    possible = advise.space(bare(row_s, cores), None, 30.0, available)
    explored = advise.exploration(possible)
    assert set(explored) <= set(possible.points) and 1 <= len(explored) <= 5
    assert 1 <= advise.rollout_steps(bare(row_s, cores), possible, 30.0) <= 128


def test_steps_that_vary_make_lockstep_wait_and_even_ones_do_not() -> None:
    stragglers = [1e-3] * 9 + [10e-3]
    assert lockstep_loss([1e-3] * 10, Point(16, 1)) == pytest.approx(1.0)
    assert lockstep_loss(stragglers, Point(16, 1)) > 3
    assert lockstep_loss(stragglers, Point(16, 64)) < 1.5 < lockstep_loss(stragglers, Point(16, 4))
    assert lockstep_loss(stragglers, Point(1, 1)) == 1.0
    assert advise.uneven(3.0, 1e-3) and not advise.uneven(3.0, 5e-6) and not advise.uneven(1.05, 1e-3)


CHOICES = (Choice("rollout", Point(2, 8), 1000.0, 0.9, 1.0, 0.01), Choice("step", Point(2, 8), 950.0, 0.85, 1.0, 0.01))
QUIET = Shares(0.9, 0.06, 0.02, 0.02)
POSSIBLE = Space((1, 2), (1, 2, 4, 8, 16, 32, 64))


def kinds(
    of: Bare | None = None, shares: Shares = QUIET, native: bool = False, load: float | None = 0.0, **more: object
) -> str:
    compared = [Compared(name, ratio, 0.0) for name, ratio in more.get("compared", {}).items()]  # type: ignore[attr-defined]
    head = more.get("head")
    notes = make_notes(
        of or bare(cores=2),
        more.get("possible", POSSIBLE),  # type: ignore[arg-type]
        more.get("choices", CHOICES),  # type: ignore[arg-type]
        shares,
        2.0,
        compared,
        native,
        head,  # type: ignore[arg-type]
        load,
    )
    return " ".join(note.kind for note in notes)


def test_an_unremarkable_run_needs_no_notes() -> None:
    assert kinds() == ""


def test_notes_name_what_costs_time() -> None:
    assert kinds(replace(bare(cores=2), reset_s=1e-3, reset_share=0.2, episode_steps=20.0)) == "resets"
    assert kinds(replace(bare(cores=2), reset_s=0.0, reset_share=0.0, episode_steps=None)) == ""
    assert kinds(shares=Shares(0.5, 0.4, 0.05, 0.05)) == "policy"
    assert kinds(shares=Shares(0.5, 0.1, 0.2, 0.2)) == "waiting overhead"
    assert kinds(bare(cores=2, slowdown=1.5)) == "contention"
    assert kinds(bare(cores=2, cpu_share=0.1)) == "idle" and kinds(bare(cores=2, cpu_share=4.0)) == "threads"
    assert kinds(load=1.9) == "noise" and kinds(replace(bare(cores=2), taken_share=0.3)) == "noise"
    assert kinds(load=None) == "" and kinds(replace(bare(cores=2), taken_share=0.3), load=None) == "noise"
    fewer = (replace(CHOICES[0], point=Point(1, 64), rate=2000.0), CHOICES[1])
    assert kinds(choices=fewer) == "workers acting"
    scarce = replace(POSSIBLE, workers_limit="memory")
    assert kinds(possible=scarce) == "limited" and kinds(possible=scarce, choices=fewer) == "workers acting"


def test_notes_name_what_would_be_faster() -> None:
    assert kinds(native=True) == "native" and kinds(compared={"native": 3.0}) == "native"
    uneven = replace(bare(cores=2), step_s=(1e-3,) * 9 + (1e-2,))
    assert kinds(uneven, compared={"send/recv": 2.0}) == "uneven"
    assert kinds(head=HeadCost(1e-6, 100.0)) == "cluster"


def test_a_head_has_a_limit_of_cores() -> None:
    assert worthwhile_cores(HeadCost(1e-6, 100.0), 10_000.0) == 100
    assert worthwhile_cores(HeadCost(1e-3, 100.0), 10_000.0) == 1


@pytest.mark.parametrize(("time_s", "text"), [(2.5, "2.5 s"), (0.012, "12 ms"), (3.4e-6, "3.4 µs"), (2e-8, "0.02 µs")])
def test_durations_have_units(time_s: float, text: str) -> None:
    assert duration(time_s) == text


def test_crowding_of_more_busy_workers_than_cores_is_their_ratio() -> None:
    assert crowding(bare(cores=4), 8) == 2.0 and crowding(bare(cores=4, cpu_share=0.5), 8) == 1.0
    assert math.isclose(crowding(bare(cores=4, slowdown=1.3), 4), 1.3)
