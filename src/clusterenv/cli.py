"""The command line: `clusterenv node`, `clusterenv script`, `clusterenv gc`."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from clusterenv._version import __version__

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="clusterenv", description="Gymnasium environments on a cluster")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    node = commands.add_parser("node", help="run the environments of one machine for a training script elsewhere")
    node.add_argument("--join", type=Path, required=True, metavar="FILE", help="the key file that the script made")
    node.add_argument("--lease-s", type=float, default=60.0, help="give up when the script is gone for so long")
    node.add_argument("--dead-after-s", type=float, default=60.0, help="a silent connection counts as gone")
    node.add_argument("--no-pickle", action="store_true", help="take ids, arguments and weights, but no code")
    node.add_argument(
        "--mounted", action="store_true", help="the key is a mounted Secret: whose file it is says nothing"
    )
    node.add_argument("--with-parent", action="store_true", help="leave when the process that started this one ends")
    script = commands.add_parser("script", help="print what a backend would submit for one node")
    script.add_argument("backend", choices=["slurm", "kubernetes"])
    script.add_argument("options", nargs="*", metavar="NAME=VALUE", help="as in Python; values are JSON, or plain text")
    gc = commands.add_parser("gc", help="remove what killed training scripts have left: jobs, key files")
    gc.add_argument("--folder", type=Path, action="append", help="where run folders are, if not in the usual places")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if args.command == "node":
        if args.with_parent:
            end_with_parent()
        return run_node(args.join, args.mounted, args.lease_s, args.dead_after_s, not args.no_pickle)
    if args.command == "script":
        return print_script(args.backend, args.options)
    from clusterenv.backends.leftovers import places, remove

    count = remove(args.folder or places(), args.dry_run, print)
    print(f"{count} runs without a head")
    return 0


def end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the line above took effect
        sys.exit(0)


def run_node(join: Path, is_mounted: bool, lease_s: float, dead_after_s: float, allow_pickle: bool) -> int:
    from clusterenv.errors import KeyFileError
    from clusterenv.node import NEVER, Agent
    from clusterenv.transport.keys import read_joining

    try:
        joining = read_joining(join, is_mounted)
    except KeyFileError as error:
        print(f"clusterenv node: {error}", file=sys.stderr)
        return NEVER
    return Agent(joining, lease_s, dead_after_s, allow_pickle).run()


def print_script(backend: str, options: list[str]) -> int:
    from clusterenv.errors import SpecError

    given = {"nodes": 1, **dict(map(_option, options))}
    try:
        print(_slurm_script(given) if backend == "slurm" else _kubernetes_manifests(given))
    except (TypeError, SpecError) as error:
        print(f"clusterenv script: {error}", file=sys.stderr)
        return 2
    return 0


def _slurm_script(options: dict[str, Any]) -> str:
    from clusterenv.backends.network import agent_command
    from clusterenv.backends.slurm import Slurm, job_script

    slurm = Slurm(**options)
    folder = Path(slurm.folder or tempfile.gettempdir()).expanduser()
    command = agent_command(folder / "clusterenv-RUN" / "node-0.key", python=slurm.python)
    log = folder / "logs" / "RUN" / "node-0.log"
    return job_script(slurm, "clusterenv-RUN", command, log, Path.cwd()).rstrip()


def _kubernetes_manifests(options: dict[str, Any]) -> str:
    from clusterenv.backends.kubernetes import Kubernetes, pod_manifest, run_manifest, secret_manifest

    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "clusterenv-RUN", "uid": "..."}
    pod = pod_manifest(Kubernetes(**options), "RUN", 0, "clusterenv-RUN-0-1", [], owner)
    items = [run_manifest("RUN"), secret_manifest("RUN", 0, "...", owner), pod]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
