"""The command line: `clusterenv node --join FILE`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from clusterenv._version import __version__

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="clusterenv", description="Gymnasium environments on a cluster")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    node = commands.add_parser("node", help="run the environments of one machine for a training script elsewhere")
    node.add_argument("--join", type=Path, required=True, metavar="FILE", help="the key file that the script made")
    node.add_argument("--lease-s", type=float, default=60.0, help="give up when the script is gone for so long")
    node.add_argument("--dead-after-s", type=float, default=60.0, help="a silent connection counts as gone")
    node.add_argument("--no-pickle", action="store_true", help="take ids, arguments and weights, but no code")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    return run_node(args.join, args.lease_s, args.dead_after_s, not args.no_pickle)


def run_node(join: Path, lease_s: float, dead_after_s: float, allow_pickle: bool) -> int:
    from clusterenv.errors import KeyFileError
    from clusterenv.node import NEVER, Agent
    from clusterenv.transport.keys import read_joining

    try:
        joining = read_joining(join)
    except KeyFileError as error:
        print(f"clusterenv node: {error}", file=sys.stderr)
        return NEVER
    return Agent(joining, lease_s, dead_after_s, allow_pickle).run()
