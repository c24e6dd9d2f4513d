"""Run the benchmark of one environment from beginning to end: `clusterenv bench my_pkg:make_env`.

Enters: a target, a time. Leaves: text or JSON on stdout, progress on stderr if that is a terminal. Measures and decides
in turns: bare loops, a few points, the fitted model's candidates, comparisons with the recommended one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

from clusterenv.arguments import expect
from clusterenv.bench import advise
from clusterenv.bench.bare import measure_bare
from clusterenv.bench.data import Compared, Mode, Point, Report
from clusterenv.bench.measure import (
    Setting,
    Subject,
    Subjects,
    Take,
    has_native,
    head_cost,
    interleave,
)
from clusterenv.bench.model import fit, lockstep_loss
from clusterenv.bench.notes import make_notes
from clusterenv.bench.progress import Progress
from clusterenv.bench.report import as_json, print_report
from clusterenv.bench.target import Target, find_target
from clusterenv.errors import ClusterEnvError, EnvError, SpecError
from clusterenv.system.cpus import usable_cores
from clusterenv.system.host_load import load_average
from clusterenv.system.memory import available_bytes

__all__ = ["main", "run"]

_BARE, _EXPLORED, _COMPARED = 0.13, 0.45, 0.06
"""Shares of the time: of the bare loops; until the model is fitted; of each comparison."""
_LEAST_FOR_ALL_S = 15.0
"""Shorter runs skip what only notes need: the native simulator, and the node agent, which takes a second to start."""
_NODE_STARTS_S = 1.5


def main(target: str, seconds: float = 30.0, workers: int | None = None, as_json: bool = False) -> int:
    """Measure the environment, print what to write, and return the exit status of the command.

    Args:
        target: an environment id, or "module:function" of a function that makes an environment.
        seconds: about how long it may take.
        workers: largest number of workers to try; None: one per usable core, more if the environment mostly waits.
        as_json: print JSON instead of text.
    """
    try:
        expect("bench", "seconds", seconds, float, least=1)
        expect("bench", "workers", workers, int | None, least=1)
        found = find_target(target)
        with Progress(sys.stderr, seconds) as progress:
            results = run(found, seconds, workers, progress)
    except ClusterEnvError as error:
        print(f"clusterenv bench: {_explained(target, error)}", file=sys.stderr)
        is_target = isinstance(error, SpecError) or (isinstance(error, EnvError) and error.phase == "init")
        return 2 if is_target else 1
    _print(results, as_json)
    return 0


def _explained(target: str, error: ClusterEnvError) -> str:
    if not isinstance(error, EnvError):
        return str(error)
    last = error.remote_traceback.rstrip().rpartition("\n")[2]
    ours = f"{SpecError.__module__}.{SpecError.__qualname__}: "
    if last.startswith(ours):  # what the function returned is no environment; where the worker noticed is irrelevant
        return f"{target}: {last.removeprefix(ours).removeprefix('ClusterEnv(env=...): ')}"
    happened = "cannot be made" if error.phase == "init" else "failed while it was reset and stepped"
    return f"{target}: an environment {happened}: {error}"


def _print(results: Report, is_json: bool) -> None:
    if is_json:
        print(as_json(results))
    else:
        print_report(results, sys.stdout)


def run(target: Target, seconds: float, workers: int | None, say: Callable[[str], None]) -> Report:
    """Measure the environment for about this long, and return the results with the recommendation."""
    begin = time.monotonic()
    load, cores = load_average(), usable_cores()
    say("starting")
    bare = measure_bare(target.make, cores, min(cores, workers or cores), _BARE * seconds, say)
    possible = advise.space(bare, workers, seconds, available_bytes())
    setting = Setting(target, advise.rollout_steps(bare, possible, seconds), advise.window(seconds))
    is_long, native = seconds >= _LEAST_FOR_ALL_S, has_native(target)
    compare_s = _COMPARED * seconds
    with Subjects(setting) as subjects:
        first = advise.exploration(possible)
        say(f"{len(first)} points, to fit a model")
        explored = subjects.measure({"rollout": first, "step": first}, begin + _EXPLORED * seconds, least=2)
        model = fit(bare, explored)
        chosen: dict[Mode, tuple[Point, ...]] = {
            "rollout": advise.candidates(model, possible, explored, "rollout", most=4),
            "step": advise.candidates(model, possible, explored, "step", most=3),
        }
        subjects.keep([point for points in chosen.values() for point in points])
        say("candidates, in interleaved rounds")
        losses = {point: lockstep_loss(bare.step_s, point) for point in chosen["step"]}
        uneven = {point for point, loss in losses.items() if advise.uneven(loss, bare.row_s) and point.num_envs > 1}
        reserve_s = compare_s * (bool(uneven) + (native and is_long)) + (compare_s + _NODE_STARTS_S) * is_long
        measured = subjects.measure(chosen, begin + seconds - reserve_s, least=3)
        rollout, step = (advise.choose(mode, measured, bare.all_rate) for mode in ("rollout", "step"))
        compared = []
        if step.point in uneven:
            say("send and recv")
            subject = subjects[step.point]
            compared.append(compare("send/recv", subject.step, subject.send_recv, setting, compare_s))
        if native and is_long:
            say('simulator="native"')
            compared.append(_compare_native(setting, subjects[rollout.point], compare_s))
        shares = next(rates.shares for rates in measured if rates.point == rollout.point)
    cost = None
    if is_long:
        say("rows over the network")
        cost = head_cost(setting, rollout.point.envs, compare_s)
    assert shares is not None  # of a point whose rollouts were measured
    choices = (rollout, step)
    notes = make_notes(bare, possible, choices, shares, losses[step.point], compared, native, cost, load)
    return Report(
        target=target.text,
        seconds=time.monotonic() - begin,
        rollout_steps=setting.rollout_steps,
        bare=bare,
        load_before=load,
        explored=explored,
        candidates=measured,
        coefficients={"rollout": model.rollout, "step": model.step},
        choices=choices,
        shares=shares,
        code=target.code(arguments(rollout.point)),
        notes=notes,
        compared=tuple(compared),
        head_cost=cost,
    )


def arguments(point: Point) -> str:
    """Return the arguments of `ClusterEnv` for a point."""
    return f"num_envs={point.num_envs}, backend=ce.Local(workers={point.workers})"


def compare(name: str, ours: Take, other: Take, setting: Setting, seconds: float) -> Compared:
    """Return how many times as fast `other` is, by the median of ratios within rounds."""
    rates = interleave({"ours": ours, name: other}, setting.window_s, time.monotonic() + seconds, least=3)
    ratios = [a / b for a, b in zip(rates[name], rates["ours"], strict=True)]
    return Compared(name, median(ratios), advise.deviation(ratios))


def _compare_native(setting: Setting, ours: Subject, seconds: float) -> Compared:
    other = Subject(setting, ours.point, simulator="native")
    try:
        return compare("native", ours.rollout, other.rollout, setting, seconds)
    finally:
        other.close()
