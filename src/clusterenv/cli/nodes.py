"""Commands for the machines of a cluster: `node`, `script`, `gc`."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

_PR_SET_PDEATHSIG = 1
_FOLDER = click.Path(path_type=Path)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)


# -- node ---------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--join", "key", type=_FOLDER, required=True, metavar="FILE", help="The node's key file; - reads stdin.")
@click.option("--key-timeout-s", type=float, default=60.0, help="How long to wait for a missing key file.")
@click.option("--key-sha256", metavar="HEX", help="Accept a key file of any owner with this SHA-256.")
@click.option("--lease-s", type=float, default=60.0, help="End when the script has been gone this long.")
@click.option("--dead-after-s", type=float, default=60.0, help="Dial again after this long without a message.")
@click.option("--grace-s", type=float, default=30.0, help="Time from SIGTERM until the scheduler's SIGKILL.")
@click.option("--no-pickle", is_flag=True, help="Accept ids, arguments and weights, but no code.")
@click.option("--mounted", is_flag=True, help="The key is a mounted Secret: do not check its owner.")
@click.option("--with-parent", is_flag=True, help="Leave when the process that started this one ends.")
def node(
    key: Path,
    key_timeout_s: float,
    key_sha256: str | None,
    lease_s: float,
    dead_after_s: float,
    grace_s: float,
    no_pickle: bool,
    mounted: bool,
    with_parent: bool,
) -> int:
    """Run the environments of one machine for a training script elsewhere."""
    from clusterenv.errors import KeyFileError
    from clusterenv.node.agent import Agent
    from clusterenv.system.exits import NEVER
    from clusterenv.transport.keys import await_joining, read_joining_from

    _log_to_stderr()
    if with_parent:
        _end_with_parent()
    try:
        if str(key) == "-":
            joining = read_joining_from(sys.stdin.buffer)
        else:
            say = logging.getLogger("clusterenv").warning
            joining = await_joining(key, key_timeout_s, say, mounted, key_sha256)
    except KeyFileError as error:
        print(f"clusterenv node: {error}", file=sys.stderr)
        return NEVER
    return Agent(joining, lease_s, dead_after_s, not no_pickle, grace_s).run()


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the line above took effect
        sys.exit(0)


# -- script -------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("backend", metavar="NAME")
@click.argument("options", nargs=-1, metavar="[OPTION=VALUE]...")
def script(backend: str, options: tuple[str, ...]) -> int:
    """Print what a backend would submit for one node.

    NAME is slurm, kubernetes, command, or another installed backend; options are as in Python, with values in JSON or
    as plain text.
    """
    from clusterenv.backends.cluster import example_plan
    from clusterenv.backends.contract import PrintsScript
    from clusterenv.backends.registry import find
    from clusterenv.backends.remote import Remote
    from clusterenv.errors import SpecError

    try:
        made = _made(find(backend), options)
        if not isinstance(made, Remote) or not isinstance(made, PrintsScript):
            raise SpecError(f"{type(made).__name__} submits no text to print")
        print(made.script(example_plan(made)).rstrip())
    except SpecError as error:
        print(f"clusterenv script: {error}", file=sys.stderr)
        return 2
    return 0


def _made(backend: type[Any], options: tuple[str, ...]) -> Any:
    """Return the backend with these NAME=VALUE options. A value is JSON if its field accepts that, else plain text."""
    from clusterenv.arguments import closest, field_kinds, fits
    from clusterenv.backends.registry import required
    from clusterenv.errors import SpecError

    kinds = field_kinds(backend)
    given: dict[str, Any] = {"nodes": 1} if "nodes" in kinds else {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise SpecError(f"{option!r}: expected NAME=VALUE, such as {name}=...")
        if name not in kinds:
            near = closest(name, kinds)
            hint = f"did you mean {near}=...?" if near else f"its options are {', '.join(sorted(kinds))}"
            raise SpecError(f"{option!r}: {backend.__name__} has no option {name!r}; {hint}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        given[name] = value if fits(value, kinds[name]) else text
    missing = [name for name in required(backend) if name not in given]
    if missing:
        raise SpecError(f"{backend.__name__} needs {missing[0]}: write {missing[0]}=...")
    return backend(**given)


# -- gc -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--folder", "folders", type=_FOLDER, multiple=True, help="Where run folders are, if not as usual.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--run", help="Remove only this run, even if it is unknown whether its script has ended.")
@click.option("--owner-squashed", is_flag=True, help="The file system (NFS) shows a different owner.")
@click.option("--kubernetes", is_flag=True, help="Also remove runs of scripts in pods of a namespace.")
@click.option("--namespace", help="With --kubernetes; default: the context's namespace.")
@click.option("--context", help="With --kubernetes: context in the kubeconfig.")
def gc(
    folders: tuple[Path, ...],
    dry_run: bool,
    run: str | None,
    owner_squashed: bool,
    kubernetes: bool,
    namespace: str | None,
    context: str | None,
) -> int:
    """Remove what killed training scripts left behind: jobs, key files."""
    from clusterenv.backends.gc import places, remove, remove_pods
    from clusterenv.monitor import records

    _log_to_stderr()
    removed = [remove(list(folders) or places(), dry_run, print, run, owner_squashed)]
    if kubernetes:
        removed.append(remove_pods(namespace, context, dry_run, print, run))
    if not dry_run:
        records.prune()
    runs, failures = (sum(counts) for counts in zip(*removed, strict=True))
    print(f"{runs} runs without a head" + (f"; {failures} could not be removed" if failures else ""))
    return 1 if failures else 0
