"""Raise the limit on open files of this process (`ulimit -n`) as far as a run needs and the hard limit allows.

It is not lowered again. Processes started later, including environments and their simulators, inherit it.
"""

from __future__ import annotations

import os
import resource

from clusterenv.errors import StartError

_SPARE = 64  # left for files that the user's own code opens


def allow_open_files(what: str, more: int, in_child: int = 0) -> None:
    """Raise the soft limit to what is needed; raise StartError if the hard limit is lower than that.

    Args:
        what: what needs the files, for the error's text.
        more: number of files that this process will open, in addition to those already open.
        in_child: total number of files that a child of this process opens; it inherits the limit.
    """
    needed = max(len(os.listdir("/proc/self/fd")) + more, in_child)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_to_set(soft, hard, needed)
    if limit is None:
        return
    if limit < needed:
        raise StartError(
            f"{what} need {needed} open files, and this process may have {hard} (hard limit, `ulimit -Hn`): ask for "
            f"fewer, or have the limit of `ulimit -n` raised to {needed} or more (limits.conf, LimitNOFILE= of a "
            "systemd unit, --ulimit nofile= of a container)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def limit_to_set(soft: int, hard: int, needed: int) -> int | None:
    """Return the soft limit to set so that `needed` files and some spare ones can be open; None: it is high enough."""
    wanted = needed + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
