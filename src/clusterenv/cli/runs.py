"""Commands that watch runs: `status`, `top`, `page`, `report`, `doctor`, `stack`, `logs`; and `bench`, `demo`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import click

from clusterenv.errors import UsageError

_RUN = click.argument("run", required=False)
_JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs.")


def _print_json(data: Any) -> None:
    import msgspec

    from clusterenv.monitor.encoding import to_json

    print(msgspec.json.format(to_json(data), indent=2).decode())


@click.command()
@_RUN
@_JSON
def status(run: str | None, as_json: bool) -> int:
    """List your runs, or show one: nodes, workers, rates, the last events.

    Without RUN, the only one is shown if there is no other; with --json, all are listed.
    """
    from clusterenv.cli.show import overview, span, table
    from clusterenv.monitor import records
    from clusterenv.monitor.client import open_run

    records.prune()
    live = records.live()
    if run is None and (as_json or len(live) != 1):
        if as_json:
            _print_json([record.info for record in live])
            return 0
        rows = [("run", "environment", "backend", "host", "process", "since")]
        for record in live:
            info = record.info
            since = span(time.time() - info.began_at)
            rows.append((info.name, f"{info.num_envs} x {info.env}", info.backend, info.host, str(info.pid), since))
        ended = records.finished()[-5:]
        print("\n".join(table(rows)) if live else "no run of yours is alive")
        if ended:
            print(f"ended: {', '.join(ended)} (clusterenv report NAME)")
        return 0
    with contextlib.closing(open_run(run)) as source:
        sample = source.sample()
        if sample is None:
            raise UsageError("the run has just begun: try again in a second")
        if as_json:
            _print_json({"info": source.info(), "sample": sample})
        else:
            print("\n".join(overview(source.info(), sample, source.events())))
    return 0


@click.command()
@_RUN
@click.option("--every-s", type=click.FloatRange(min=0.1), default=1.0, help="Time between two updates.")
def top(run: str | None, every_s: float) -> int:
    """Show a run in this terminal, updated every second; Ctrl-C ends it, and not the run."""
    from clusterenv.cli.show import overview
    from clusterenv.monitor.client import open_run

    with contextlib.closing(open_run(run)) as source, contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                sample, events = source.sample(), source.events()
            except ConnectionError as error:
                print(f"\n{error}")
                return 0
            if sample is not None:
                columns, rows = os.get_terminal_size() if sys.stdout.isatty() else (200, 1000)
                lines = overview(source.info(), sample, events, most=max(4, rows - 20))
                clear = "\x1b[H\x1b[J" if sys.stdout.isatty() else ""
                print(clear + "\n".join(line[:columns] for line in lines), flush=True)
                if sample.is_over:
                    return 0
            time.sleep(every_s)
    return 0


@click.command()
@click.argument("slot", type=int)
@click.option("--run", help="Name of the run; default: the only one.")
def stack(slot: int, run: str | None) -> int:
    """Show where the environment of SLOT is right now: the stack of its worker."""
    from clusterenv.monitor.client import Client, find
    from clusterenv.monitor.terminal import clean_lines

    with contextlib.closing(Client(find(run))) as client:
        print(clean_lines(client.stack(slot)))
    return 0


@click.command()
@click.argument("node", type=int)
@click.option("--run", help="Name of the run; default: the only one.")
def logs(node: int, run: str | None) -> int:
    """Show the last lines that the agent of NODE wrote."""
    from clusterenv.monitor.client import Client, find
    from clusterenv.monitor.terminal import clean_lines

    with contextlib.closing(Client(find(run))) as client:
        print(clean_lines(client.log(node)))
    return 0


@click.command()
@_RUN
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of this machine; default: any free one.")
def page(run: str | None, port: int) -> int:
    """Serve the page of a run until Ctrl-C, for browsers of this machine that have its address."""
    from clusterenv.monitor.client import open_run

    start = _page_server()
    with contextlib.closing(open_run(run)) as source:
        served = start(source, port=port)
        number = served.url.split(":")[2].split("/")[0]
        print(f"{served.url}\nfrom another machine: ssh -L {number}:127.0.0.1:{number} {socket.gethostname()}")
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            print(f"from outside of the cluster: kubectl port-forward {socket.gethostname()} {number}:{number}")
        sys.stdout.flush()
        try:
            while True:
                time.sleep(1.0)
        except KeyboardInterrupt:
            return 0
        finally:
            served.close()


def _page_server() -> Any:
    try:
        from clusterenv.monitor.page.serve import start
    except ImportError as error:
        raise UsageError(f"the page needs `pip install clusterenv[dashboard]`: {error}") from error
    return start


@click.command()
@_RUN
@click.option("--to", "path", type=click.Path(path_type=Path), help="The file to write; default: RUN.html.")
def report(run: str | None, path: Path | None) -> int:
    """Write the page of a run, also of one that has ended, as one HTML file."""
    from clusterenv.monitor.client import open_run
    from clusterenv.monitor.page.report import write_report

    with contextlib.closing(open_run(run)) as source:
        path = path or Path(f"{source.info().name}.html")
        write_report(source, path)
    print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


@click.command()
@_RUN
@click.option("--worker", type=click.IntRange(min=0), help="Only what explains why this worker is slow, stale or dead.")
@_JSON
def doctor(run: str | None, worker: int | None, as_json: bool) -> int:
    """Check this machine, or find out why a RUN is slow, stale or dead ("-": the only one)."""
    from clusterenv.monitor import doctor as checking
    from clusterenv.monitor.client import open_run

    checks = findings = sample = None
    if run is None:
        if worker is not None:
            raise UsageError('--worker needs the name of a run ("-": the only one)')
        checks = checking.check_machine()
        is_bad = any(check.status is checking.Status.PROBLEM for check in checks)
    else:
        with contextlib.closing(open_run(None if run == "-" else run)) as source:
            sample = source.sample()
            if worker is not None and sample is not None and worker >= len(sample.workers):
                raise UsageError(f"there is no worker {worker}: the run has {len(sample.workers)}")
            findings = checking.diagnose_run(source)
        if worker is not None:
            findings = checking.concerning(findings, worker)
        is_bad = any(finding.severity is not checking.Severity.ADVICE for finding in findings)
    if as_json:
        print(checking.as_json(checks, findings))
    elif findings == [] and sample is not None and sample.is_over:
        print("the run has ended, and nothing that it recorded explains a failure")
    else:
        checking.print_report(checks, findings)
    return 1 if is_bad else 0


@click.command()
@click.argument("env")
@click.option("--seconds", type=click.FloatRange(min=1), default=30.0, help="About how long to measure.")
@click.option("--workers", type=click.IntRange(min=1), help="Most workers to try; default: the CPUs of this machine.")
@_JSON
def bench(env: str, seconds: float, workers: int | None, as_json: bool) -> int:
    """Measure how many workers pay for ENV, an id or my_package:make_env, and where the time goes."""
    from clusterenv.bench import main as measure

    return measure(env, seconds, workers, as_json)


@click.command()
@click.option("--seconds", type=click.FloatRange(min=1), default=15.0, help="How long to run.")
@click.option("--env", default="CartPole-v1", help="Id of the environment.")
def demo(seconds: float, env: str) -> int:
    """Run environments in worker processes, kill one worker, and show what happens."""
    from clusterenv.cli.demo import run_demo

    return run_demo(env, seconds)
