"""Implement the command line: `clusterenv node`, `clusterenv script`, `clusterenv gc`."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from clusterenv import __version__

_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="clusterenv", description="Gymnasium environments on a cluster")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    node = commands.add_parser("node", help="run the environments of one machine for a training script elsewhere")
    node.add_argument("--join", type=Path, required=True, metavar="FILE", help="the node's key file; - reads stdin")
    node.add_argument("--key-timeout-s", type=float, default=60.0, help="how long to wait for a missing key file")
    node.add_argument("--key-sha256", metavar="HEX", help="accept a key file of any owner with this SHA-256")
    node.add_argument("--lease-s", type=float, default=60.0, help="end when the script has been gone this long")
    node.add_argument("--dead-after-s", type=float, default=60.0, help="dial again after this long without a message")
    node.add_argument("--grace-s", type=float, default=30.0, help="time from SIGTERM until the scheduler's SIGKILL")
    node.add_argument("--no-pickle", action="store_true", help="accept ids, arguments and weights, but no code")
    node.add_argument("--mounted", action="store_true", help="the key is a mounted Secret: do not check its owner")
    node.add_argument("--with-parent", action="store_true", help="leave when the process that started this one ends")
    script = commands.add_parser("script", help="print what a backend would submit for one node")
    script.add_argument("backend", metavar="NAME", help="slurm, kubernetes, or another installed backend")
    script.add_argument("options", nargs="*", metavar="NAME=VALUE", help="as in Python; values are JSON, or plain text")
    gc = commands.add_parser("gc", help="remove what killed training scripts left behind: jobs, key files")
    gc.add_argument("--folder", type=Path, action="append", help="where run folders are, if not in the default places")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--run", help="remove only this run, even if it is unknown whether its script has ended")
    gc.add_argument("--owner-squashed", action="store_true", help="the file system (NFS) shows a different owner")
    gc.add_argument("--kubernetes", action="store_true", help="also remove runs of scripts in pods of a namespace")
    gc.add_argument("--namespace", help="with --kubernetes; default: the context's namespace")
    gc.add_argument("--context", help="with --kubernetes: context in the kubeconfig")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if args.command == "node":
        if args.with_parent:
            end_with_parent()
        return run_node(args)
    if args.command == "script":
        return print_script(args.backend, args.options)
    return collect_garbage(args)


def collect_garbage(args: argparse.Namespace) -> int:
    from clusterenv.backends.gc import places, remove, remove_pods

    removed = [remove(args.folder or places(), args.dry_run, print, args.run, args.owner_squashed)]
    if args.kubernetes:
        removed.append(remove_pods(args.namespace, args.context, args.dry_run, print, args.run))
    runs, failures = (sum(counts) for counts in zip(*removed, strict=True))
    print(f"{runs} runs without a head" + (f"; {failures} could not be removed" if failures else ""))
    return 1 if failures else 0


def end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the line above took effect
        sys.exit(0)


def run_node(args: argparse.Namespace) -> int:
    from clusterenv.errors import KeyFileError
    from clusterenv.node.agent import Agent
    from clusterenv.system.exits import NEVER
    from clusterenv.transport.keys import await_joining, read_joining_from

    try:
        if str(args.join) == "-":
            joining = read_joining_from(sys.stdin.buffer)
        else:
            say = logging.getLogger("clusterenv").warning
            joining = await_joining(args.join, args.key_timeout_s, say, args.mounted, args.key_sha256)
    except KeyFileError as error:
        print(f"clusterenv node: {error}", file=sys.stderr)
        return NEVER
    return Agent(joining, args.lease_s, args.dead_after_s, not args.no_pickle, args.grace_s).run()


def print_script(name: str, options: list[str]) -> int:
    from clusterenv.backends.cluster import example_plan
    from clusterenv.backends.contract import PrintsScript
    from clusterenv.backends.registry import find
    from clusterenv.backends.remote import Remote
    from clusterenv.errors import SpecError

    try:
        backend = _made(find(name), options)
        if not isinstance(backend, Remote) or not isinstance(backend, PrintsScript):
            raise SpecError(f"{type(backend).__name__} submits no text to print")
        print(backend.script(example_plan(backend)).rstrip())
    except SpecError as error:
        print(f"clusterenv script: {error}", file=sys.stderr)
        return 2
    return 0


def _made(backend: type[Any], options: list[str]) -> Any:
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
