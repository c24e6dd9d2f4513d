"""The command line: `clusterenv COMMAND`. Each command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from clusterenv import __version__
from clusterenv.cli.nodes import gc, node, script
from clusterenv.cli.runs import bench, demo, doctor, logs, page, report, stack, status, top
from clusterenv.errors import ClusterEnvError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="clusterenv")
def commands() -> None:
    """Gymnasium environments on a cluster: watch runs, and run their nodes."""


for _command in (demo, status, top, page, report, doctor, stack, logs, bench, node, script, gc):
    commands.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code."""
    try:
        return int(commands.main(args=argv, prog_name="clusterenv", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except BrokenPipeError:  # `clusterenv status | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's exit would report it
        return 141
    except (ClusterEnvError, OSError) as error:
        print(f"clusterenv: {error}", file=sys.stderr)
        return 2
