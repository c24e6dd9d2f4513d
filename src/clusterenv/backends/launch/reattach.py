"""Let a new head take over the nodes of the last one, if that is possible: they dial its address, with its keys."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusterenv.backends.launch.folder import RunFolder, key_file
from clusterenv.backends.launch.note import NAME, now_there
from clusterenv.cluster.head import Head
from clusterenv.journal import ClusterRecord
from clusterenv.transport.keys import KeyPair, make_keys

_UNTOUCHED_S = 30.0
"""How old the note of a running head may be: the head touches it every 15 s."""

_RETURN_S = 5.0
"""How long to wait for nodes of an earlier head after the last one has joined: they dial twice a second."""


class Identity(NamedTuple):
    """The folder, keys and ports by which a head and its nodes recognize each other."""

    folder: RunFolder
    keys: KeyPair
    node_keys: list[str]
    """Public keys, in the order of the nodes' numbers."""
    pairs: list[KeyPair] | None
    """The nodes' key pairs, if their key files have yet to be written."""
    ports: Sequence[int]
    nodes: int
    """Number of nodes that take part."""


def new_identity(folder: RunFolder, ports: Sequence[int], nodes: int, most: int) -> Identity:
    pairs = [make_keys() for _ in range(most)]
    return Identity(folder, make_keys(), [pair.public for pair in pairs], pairs, ports, nodes)


def reopen(record: ClusterRecord, nodes: int, lease_s: float, journal: Path, any_owner: bool) -> Identity:
    """Return the identity of the head that wrote this record. `nodes`: the backend's current option."""
    note = _note(Path(record.folder))
    jobs = note["jobs"] if note is not None else {}
    folder = RunFolder(None, lease_s, any_owner, str(journal), (record.run, Path(record.folder), jobs))
    folder.find_keys(len(record.node_keys))
    invited = record.invited if record.nodes == nodes else nodes  # keep the scaled number unless `nodes` changed
    keys = KeyPair(record.public, record.secret)
    return Identity(folder, keys, list(record.node_keys), None, (record.port,), invited)


def obstacle(record: ClusterRecord, most: int, host: str, ports: Sequence[int], address: str) -> str:
    """Return why this head cannot take over the nodes of the head that wrote this record; "" if it can.

    Args:
        most: the maximum number of nodes.
        host, ports: where this head listens; 0 is any port.
        address: what nodes would dial if this head listened on the record's port.
    """
    folder = Path(record.folder)
    note = _note(folder)
    if note is None or not all(key_file(folder, node).is_file() for node in range(len(record.node_keys))):
        return f"their key files in {folder} are gone"
    away_s = now_there(folder) - (folder / NAME).stat().st_mtime
    if away_s > note["lease_s"] + _UNTOUCHED_S:
        return f"the last head was seen {away_s:.0f} s ago, and their lease was {note['lease_s']:g} s"
    if len(record.node_keys) != most:
        return f"their maximum number was {len(record.node_keys)}, and is {most} now"
    if record.port not in ports and 0 not in ports:
        return f"they dial port {record.port}, which port= does not include"
    if address != record.address:
        return f"they dial {record.address}, but this head can be dialled at {address}"
    return "" if _is_free(host, record.port) else f"they dial {record.address}, but that port is in use"


def await_return(head: Head, nodes: int) -> set[int]:
    """Wait for nodes of the earlier head to rejoin by themselves, and return those that did."""
    missing, came = set(range(nodes)), time.monotonic()
    while missing and time.monotonic() - came < _RETURN_S:
        head.pump(0.1)
        if missing != (now_missing := set(head.roster.missing)):
            missing, came = now_missing, time.monotonic()
    return set(range(nodes)) - missing


def _note(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        note: dict[str, Any] = json.loads((folder / NAME).read_text())
        return note if {"lease_s", "jobs"} <= note.keys() else None
    return None


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
