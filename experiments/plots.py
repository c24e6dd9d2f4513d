"""The plots of docs/evidence.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import TASKS
from experiments.records import Runs, score
from experiments.stats import spread

__all__ = ["PAPER", "draw"]

PAPER = ("paper", "paper, shorter rollouts")
_MARKS = {"Always": "s", "Every": "^", "APS": "o", "Shuffled": "x", "Random": "+", "Never": "v"}


def draw(runs: Runs, folder: Path) -> None:
    """Whatever of them there is data for."""
    import matplotlib

    matplotlib.use("Agg")
    tasks = [task for task in runs.tasks if task not in PAPER]
    settings = [task for task in PAPER if task in runs.tasks] or [task for task in tasks if "LunarLander" in task]
    if settings:
        _returns(runs, settings).savefig(folder / "returns.png", dpi=110)
        _pulls(runs, settings).savefig(folder / "pulls.png", dpi=110)
    if tasks:
        _pareto(runs, tasks).savefig(folder / "pareto.png", dpi=110)
        _savings(runs, tasks).savefig(folder / "savings.png", dpi=110)


def _panels(count: int, width: float = 5.2, columns: int = 3) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    columns = min(count, columns)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, 3.6 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, axes.flat


def _returns(runs: Runs, tasks: list[str]) -> Any:
    """Mean over seeds, and the range of the seeds."""
    figure, axes = _panels(len(tasks), 6.4)
    for axis, task in zip(axes, tasks, strict=False):
        for color, arm in _colored(_own_arms(runs, task)):
            curves = np.array([record["curve"] for record in runs.of(task, arm)], dtype=np.float64)
            x = (np.arange(curves.shape[1]) + 0.5) / curves.shape[1] * TASKS[task].total_steps
            known = ~np.isnan(curves).all(axis=0)  # a long rollout may leave a part of the run without an end
            x, curves = x[known], curves[:, known]
            axis.plot(x, np.nanmean(curves, axis=0), color=color, label=arm)
            axis.fill_between(x, np.nanmin(curves, axis=0), np.nanmax(curves, axis=0), color=color, alpha=0.12)
        axis.set(title=task, xlabel="steps", ylabel="return of the episodes that ended")
        axis.legend(fontsize=7)
    return figure


def _pulls(runs: Runs, tasks: list[str]) -> Any:
    """Cumulative pulls of the first worker, every seed a line."""
    figure, axes = _panels(len(tasks), 6.4)
    for axis, task in zip(axes, tasks, strict=False):
        for color, arm in _colored(_own_arms(runs, task)):
            for i, record in enumerate(runs.of(task, arm)):
                versions = [*record["pulled"], record["versions"] - 1]
                counts = [*range(1, len(record["pulled"]) + 1), len(record["pulled"])]
                axis.step(versions, counts, where="post", color=color, alpha=0.7, label=arm if not i else None)
        axis.set(title=task, xlabel="learner updates", ylabel="pulls of a worker")
        axis.legend(fontsize=7)
    return figure


def _pareto(runs: Runs, tasks: list[str]) -> Any:
    from matplotlib.ticker import NullFormatter

    figure, axes = _panels(len(tasks))
    for axis, task in zip(axes, tasks, strict=False):
        shown = {arm: runs.of(task, arm) for arm in runs.arms(task) if "=" not in arm}
        sizes = {
            arm: np.mean([record["sent_bytes"] for record in records]) / 1e6
            for arm, records in shown.items()
            if len(records) >= 3
        }
        for i, (arm, x) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
            records = shown[arm]
            value, low, high = spread([score(record, "area") for record in records])
            color = "tab:orange" if " " in arm else "tab:blue" if arm.startswith("APS") else "gray"
            mark = _MARKS[arm.partition("(")[0].split(" ")[0]]
            axis.errorbar(x, value, [[value - low], [high - value]], marker=mark, color=color, capsize=2, lw=0.8)
            beside = (3, 3 if i % 2 else -8)
            axis.annotate(arm, (x, value), fontsize=6, xytext=beside, textcoords="offset points")
        axis.set(
            title=task,
            xscale="log",
            xlabel="MB from head to nodes",
            ylabel="area under the curve",
        )
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.margins(x=0.15)
    return figure


def _savings(runs: Runs, tasks: list[str]) -> Any:
    """Each APS arm of each task a point. Kappa here is the drift between two requests of a node: one update of PPO, the
    64 and more gradient steps that SAC and DQN make in that time."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    for task in tasks:
        always = runs.of(task, "Always")
        if not always:
            continue
        kappa = np.mean([record["drift_at_pull"]["50"] for record in always])
        most = np.mean([record["pulls"] for record in always])
        points = {}
        for arm in reversed(runs.arms(task)):  # whole weights after packed ones, which pull as often
            delta, _, rest = arm.removeprefix("APS(").partition(")")
            if arm.startswith("APS(") and rest in ("", " auto"):
                pulls = np.mean([record["pulls"] for record in runs.of(task, arm)])
                points[float(delta) / kappa] = most / pulls
        if points:
            axis.plot(*zip(*sorted(points.items()), strict=True), marker="o", ms=4, label=task)
    x = np.geomspace(0.3, 200, 50)
    axis.plot(x, np.maximum(1, np.sqrt(x)), "k:", lw=1, label="directed drift: the root of delta / kappa")
    axis.plot(x, np.maximum(1, x), "k--", lw=1, label="diffusive drift: delta / kappa")
    axis.set(xscale="log", yscale="log", xlabel="delta / kappa", ylabel="pulls of Always / pulls of APS")
    axis.legend(fontsize=8)
    return figure


def _own_arms(runs: Runs, task: str) -> list[str]:
    return [arm for arm in runs.arms(task) if arm == "Always" or (arm.startswith("APS(") and " " not in arm)]


def _colored(arms: list[str]) -> list[tuple[Any, str]]:
    import matplotlib.pyplot as plt

    colors = plt.get_cmap("viridis")(np.linspace(0, 0.92, max(1, len(arms) - 1)))
    return [("black" if arm == "Always" else tuple(colors[i - 1]), arm) for i, arm in enumerate(arms)]
