"""`python -m experiments.report`: the tables and plots of docs/evidence.md, from the raw lines alone.

Text between `<!-- NAME -->` and `<!-- end -->` is replaced; the prose around it is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots
from experiments.__main__ import DATA
from experiments.arms import HALF, MAIN, PACKED
from experiments.records import Records, Runs, fewer, fewer_pulls, read, score
from experiments.stats import FEW, MARGIN, Interval, difference, pass_rate, probability_of_improvement, spread

BESIDE: tuple[tuple[str, ...], ...] = ((), ("drift_bytes",), ("drift_bytes", "fragment_bytes"))
"""What is counted beside the bytes from head to nodes."""
DOCS = Path(__file__).parent.parent / "docs"


# -- tables -------------------------------------------------------------------------------------------------------


def power_table(runs: Runs) -> str:
    sizes = (5, 10, 20, 30, 50)
    lines = []
    for task in _compared(runs):
        scores = [score(record) for record in runs.of(task, "Always")]
        rates = [f"{pass_rate(scores, n):.0%}" for n in sizes]
        lines.append([task, str(len(scores)), f"{np.std(scores, ddof=1):.3f}", *rates])
    return table(["task", "runs of Always", "deviation of a score", *(f"{n} seeds" for n in sizes)], lines)


def main_table(runs: Runs) -> str:
    titles = [
        "task",
        "arm",
        "seeds",
        "score (IQM)",
        "against Always",
        "non-inferior",
        "updates per pull",
        "bytes fewer by",
        "with samples",
        "all traffic",
    ]
    lines = []
    for task in _compared(runs):
        for arm in (MAIN[0], PACKED, *MAIN[1:], *HALF):
            mine, base = runs.pairs(task, arm, "Always")
            if len(mine) < 3:
                continue
            scores = [score(record) for record in mine]
            cells = [task if arm == MAIN[0] else "", arm, str(len(mine)), _shown(spread(scores))]
            if arm == "Always":
                cells += ["", ""]
            else:
                delta = difference(scores, [score(record) for record in base])
                verdict = "yes" if delta.low > -MARGIN else "**not shown**"
                cells += [_change(delta, len(mine)), verdict if len(mine) >= FEW else "too few seeds"]
            cells += [_mean(mine, fewer_pulls), *(_mean(mine, partial(fewer, beside=beside)) for beside in BESIDE)]
            lines.append(cells)
    return table(titles, lines)


def factors_table(runs: Runs) -> str:
    """How many times fewer bytes than by pushing every version whole, step by step."""
    lines = []
    for task in _compared(runs):
        arms = [runs.of(task, arm) for arm in ("Always", PACKED, "APS(0.02)", "APS(0.02) auto")]
        means = [np.mean([fewer(record) for record in records]) if records else None for records in arms]
        cells = [task, *("" if mean is None else f"{mean:,.1f}" for mean in means)]
        cells.append("" if means[1] is None or means[3] is None else f"{means[3] / means[1]:.1f}")
        lines.append(cells)
    titles = ["task", "Always", "Always, packed", "APS(0.02)", "APS(0.02), packed", "the rule's part, packed"]
    return table(titles, lines)


def timing_table(runs: Runs) -> str:
    titles = [
        "task",
        "delta",
        "seeds",
        "P(score: APS > shuffled)",
        "P(late score: APS > shuffled)",
        "drift at 90 %: APS",
        "shuffled",
    ]
    lines = []
    for task in _compared(runs):
        for delta in ("0.02", "0.2"):
            aps, shuffled = runs.pairs(task, f"APS({delta})", f"Shuffled({delta})")
            if len(aps) < 3:
                continue
            cells = [task, delta, str(len(aps))]
            for of in ("area", "late"):
                ours, theirs = ([score(record, of) for record in side] for side in (aps, shuffled))
                chance = probability_of_improvement(ours, theirs)
                cells.append(_shown(chance) if len(aps) >= FEW else f"{chance.value:.3f}")
            cells += [f"{np.mean([r['drift']['90'] for r in side]):.2g}" for side in (aps, shuffled)]
            lines.append(cells)
    return table(titles, lines)


def grid_table(runs: Runs) -> str:
    titles = [
        "task",
        "arm",
        "seeds",
        "score (IQM)",
        "late score",
        "updates per pull",
        "bytes fewer by",
        "drift at pull",
        "ESS, 10 %",
    ]
    lines = []
    for task in _compared(runs):
        for arm in runs.arms(task):
            mine = runs.of(task, arm)
            if len(mine) < 3 or "=" in arm:
                continue
            ess = [record["ess"]["10"] for record in mine if record["ess"]]
            at_pull = [record["drift_at_pull"]["50"] for record in mine if record["drift_at_pull"]]
            cells = [task, arm, str(len(mine)), _shown(spread([score(record) for record in mine]))]
            cells += [_shown(spread([score(record, "late") for record in mine]))]
            cells += [_mean(mine, fewer_pulls), _mean(mine, fewer), f"{np.mean(at_pull):.2g}" if at_pull else ""]
            cells.append(f"{np.mean(ess):.3f}" if ess else "")
            lines.append(cells)
    return table(titles, lines)


def ablation_table(runs: Runs) -> str:
    titles = ["task", "arm", "seeds", "score (IQM)", "against", "difference", "late score", "pulls", "MB to nodes"]
    lines = []
    for task in _compared(runs):
        for arm in runs.arms(task):
            base = arm.split(" ")[0]
            mine, other = runs.pairs(task, arm, base)
            if arm == base or len(mine) < 3:
                continue
            scores, others = ([score(record) for record in side] for side in (mine, other))
            late = [score(record, "late") for record in mine]
            cells = [task, arm, str(len(mine)), _shown(spread(scores)), base]
            cells += [_change(difference(scores, others), len(mine)), _shown(spread(late))]
            cells += [_mean(mine, lambda r: r["pulls"]), f"{np.mean([r['sent_bytes'] for r in mine]) / 1e6:.2f}"]
            lines.append(cells)
    return table(titles, lines)


def kappa_table(runs: Runs) -> str:
    titles = [
        "task",
        "kappa: 10 %",
        "median",
        "90 %",
        "between two requests",
        "updates",
        "policy, bytes",
        "a pull, packed",
        "all that goes to a node, per update",
    ]
    lines = []
    for task in _compared(runs):
        always = runs.of(task, "Always")
        kappas = [f"{np.mean([record['kappa'][q] for record in always]):.2g}" for q in ("10", "50", "90")]
        between = np.mean([record["drift_at_pull"]["50"] for record in always])
        updates = _mean(always, lambda r: r["versions"] - 1)
        cells = [task, *kappas, f"{between:.2g}", updates, str(always[0]["policy_bytes"])]
        packed = runs.of(task, "APS(0.02) auto")
        a_pull = [r["weight_bytes"] / r["pulls"] for r in packed]
        an_update = [r["sent_bytes"] / r["versions"] / r["nodes"] for r in packed]
        cells += [f"{np.mean(sizes):.0f}" if sizes else "" for sizes in (a_pull, an_update)]
        lines.append(cells)
    return table(titles, lines)


def cost_table(runs: Runs) -> str:
    lines, total = [], 0.0
    for task in runs.tasks:
        records = [record for arm in runs.arms(task) for record in runs.of(task, arm)]
        hours = sum(record["seconds"] for record in records) / 3600
        total += hours
        cores = sorted({record["cores"] for record in records})
        lines.append([task, str(len(records)), f"{hours:.1f}", " and ".join(map(str, cores))])
    return table(["task", "runs", "core hours", "cores of the machine"], [*lines, ["all", "", f"{total:.1f}", ""]])


def paper_table(runs: Runs) -> str:
    titles = ["setting", "arm", "seeds", "return", "updates", "pulls per worker", "published trigger: steps per worker"]
    lines = []
    for task in plots.PAPER:
        for arm in runs.arms(task):
            mine = runs.of(task, arm)
            fired = ""
            if arm.startswith("APS"):
                delta = arm[4:-1]
                shares = [record["published"][delta] / record["published"]["steps"] for record in mine]
                fired = f"{np.mean(shares):.1%} of {mine[0]['steps'] // 256:,}"
            returns = [record["late_return"] for record in mine]
            spread = f"{np.mean(returns):.0f} ({min(returns):.0f} to {max(returns):.0f})"
            pulls = f"{np.mean([record['pulls'] / record['nodes'] for record in mine]):.1f}"
            lines.append([task, arm, str(len(mine)), spread, str(mine[0]["versions"] - 1), pulls, fired])
    return table(titles, lines)


def wallclock_table(lines: Records) -> str:
    """Medians over the rounds: an update's seconds, how many times faster than by the first rule, kB to a node."""
    rules = list(dict.fromkeys(line["rule"] for line in lines))
    by = {(line["link"], line["round"], line["rule"]): line for line in lines}
    rows = []
    for link in sorted({line["link"] for line in lines}, reverse=True):
        rounds = sorted({line["round"] for line in lines if line["link"] == link})
        cells = [f"{link * 8 / 1e6:g} Mbit/s"]
        for rule in rules:
            mine, base = ([by[link, number, name] for number in rounds] for name in (rule, rules[0]))
            seconds = np.median([line["mean_s"] for line in mine])
            gain = np.median([b["mean_s"] / a["mean_s"] for a, b in zip(mine, base, strict=True)])
            cells.append(f"{seconds:.2f} s ({gain:.1f}x), {np.median([line['kB_per_update'] for line in mine]):.0f} kB")
        rows.append(cells)
    return table(["link of a node", *rules], rows)


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _compared(runs: Runs) -> list[str]:
    return [task for task in runs.tasks if task not in plots.PAPER]


def _change(delta: Interval, seeds: int) -> str:
    return _shown(delta, sign=True) if seeds >= FEW else f"{delta.value:+.3f}"


def _shown(interval: Interval, sign: bool = False) -> str:
    form = "{:+.3f}" if sign else "{:.3f}"
    return f"{form.format(interval.value)} ({form.format(interval.low)} to {form.format(interval.high)})"


def _mean(records: Records, of: Callable[[dict[str, Any]], float]) -> str:
    value = float(np.mean([of(record) for record in records]))
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


# -- the page -----------------------------------------------------------------------------------------------------

BLOCKS: dict[str, Callable[[Runs], str]] = {
    "power": power_table,
    "main": main_table,
    "factors": factors_table,
    "timing": timing_table,
    "grid": grid_table,
    "ablations": ablation_table,
    "kappa": kappa_table,
    "cost": cost_table,
    "paper": paper_table,
    "wallclock": lambda _: wallclock_table(read(DATA / "wallclock.jsonl")),
}


def fill(page: str, runs: Runs) -> str:
    """The page with every block made anew."""

    def made(match: re.Match[str]) -> str:
        return f"<!-- {match['name']} -->\n{BLOCKS[match['name']](runs)}\n<!-- end -->"

    return re.sub(r"<!-- (?P<name>\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA / "runs.jsonl")
    parser.add_argument("--page", type=Path, default=DOCS / "evidence.md")
    parser.add_argument("--plots", type=Path, default=DOCS / "evidence")
    parser.add_argument("--show", action="store_true", help="print the tables instead of writing the page")
    args = parser.parse_args()
    runs = Runs(read(args.data))
    if args.show:
        for name in ("kappa", "grid", "main", "timing"):
            print(f"\n{name}\n{BLOCKS[name](runs)}")
    else:
        args.page.write_text(fill(args.page.read_text(), runs))
    args.plots.mkdir(parents=True, exist_ok=True)
    plots.draw(runs, args.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
