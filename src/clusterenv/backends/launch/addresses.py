"""Decide where the head listens and which address nodes dial, from a backend's `bind`, `port` and `advertise`.

Everything but `listening_address` is pure; it asks the kernel for the addresses and routes of this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusterenv.errors import SpecError, StartError

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP = 1
_UNUSABLE = 0x08 | 0x40
"""Flags of an IPv6 address that cannot be used: duplicate detection failed, or has not finished."""

_EVERY = ("*", "0.0.0.0", "::", "[::]")
_OUTSIDE = ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1"))
"""External addresses to ask the kernel for the local address that it would use; nothing is sent to them."""


class Advertised(NamedTuple):
    """The host and port that nodes dial instead of the address that the head listens on."""

    host: str
    port: int | None  # None: the port that the head listens on


# -- decisions ----------------------------------------------------------------------------------------------------


def choose(who: str, bind: str | None, own: Mapping[str, Sequence[str]], routed: str | None) -> str:
    """Return the address to listen on.

    Args:
        who: the name of the backend, for errors.
        own: the addresses of each interface that is up.
        routed: the address from which this machine reaches others, if it has a route.
    """
    if bind in _EVERY:
        raise SpecError(f"{who}(bind={bind!r}) would listen on every network: name an address or an interface")
    if bind is not None:
        address = _ip(bind)
        if address is not None:
            if _is_link_local(address):
                raise SpecError(
                    f"{who}(bind={bind!r}) is a link-local address, which nodes cannot dial without naming one of "
                    f"their own interfaces: give another address of this machine"
                )
            return address
        usable = _usable(own.get(bind, ()))
        if not usable:
            raise SpecError(
                f"{who}(bind={bind!r}) is neither an address nor an interface that is up and has one; found {list(own)}"
            )
        return usable[0]
    if routed is not None:
        return routed
    candidates = {
        name: usable[0]
        for name, addresses in own.items()
        if (usable := [a for a in _usable(addresses) if not ipaddress.ip_address(a).is_loopback])
    }
    if not candidates:
        raise StartError(
            f"{who}(bind=None): this machine has only loopback addresses, which nodes elsewhere cannot dial. "
            f"Connect it to their network, or give bind='127.0.0.1' if every node runs on this machine"
        )
    if len(candidates) > 1:
        found = ", ".join(f"{name} {address}" for name, address in candidates.items())
        raise StartError(
            f"{who}(bind=None): this machine has no default route and several addresses: {found}. Name the interface "
            f"that nodes can reach, for example bind={next(iter(candidates))!r}"
        )
    return next(iter(candidates.values()))


def parse_port(port: Any, who: str = "Remote") -> range:
    """Return the ports to try, in order; `range(0, 1)` stands for any free port."""
    pair = (port, port) if _is_port(port, 0) else port
    if not (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and (tuple(pair) == (0, 0) or all(_is_port(each, 1) for each in pair))
        and pair[0] <= pair[1]
    ):
        raise SpecError(
            f"{who}(port={port!r}): expected 0 (any free port), a port from 1 to 65535, or a range (low, high) of them"
        )
    return range(pair[0], pair[1] + 1)


def parse_advertise(advertise: Any, who: str = "Remote") -> Advertised | None:
    """Return the host and port of `advertise`; an IPv6 address needs brackets if a port follows."""
    if advertise is None:
        return None
    text = str(advertise)
    matched = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d{1,5}))?", text)
    host, port = (matched[1], matched[2]) if matched else (text, None)
    address = _ip(host)
    is_name = re.fullmatch(r"(?!-)[A-Za-z0-9._-]+", host) is not None
    if (
        not isinstance(advertise, str)
        or host in _EVERY
        or (address is None and not is_name)
        or (address is not None and _is_link_local(address))
        or (port is not None and not _is_port(int(port), 1))
    ):
        raise SpecError(
            f"{who}(advertise={advertise!r}): expected a 'host' or 'host:port' that nodes can dial: a name, an IPv4 "
            f"address, or an IPv6 address ('[fd00::1]:4711' with a port)"
        )
    return Advertised(address or host, None if port is None else int(port))


def dialled(listening: str, advertised: Advertised | None) -> str:
    """Return the address that nodes dial for a head that listens on `listening`."""
    if advertised is None:
        return listening
    port = advertised.port or int(listening.rpartition(":")[2])
    host = f"[{advertised.host}]" if ":" in advertised.host else advertised.host
    return f"tcp://{host}:{port}"


def parse_if_inet6(table: str) -> dict[str, list[str]]:
    """Return the IPv6 addresses of each interface, from the text of /proc/net/if_inet6."""
    found: dict[str, list[str]] = {}
    for line in table.splitlines():
        digits, _, _, _, flags, name = line.split()
        if not int(flags, 16) & _UNUSABLE:
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def _ip(text: str) -> str | None:
    """Return an IP address in canonical form, without brackets; None for anything else."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text[1:-1] if text.startswith("[") and text.endswith("]") else text))
    return None


def _is_link_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.version == 6 and parsed.is_link_local


def _usable(addresses: Sequence[str]) -> list[str]:
    """Return the addresses that other machines can dial, IPv4 first."""
    return sorted((a for a in addresses if not _is_link_local(a)), key=lambda a: ":" in a)


def _is_port(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= 65535


# -- queries to the kernel ----------------------------------------------------------------------------------------


def listening_address(who: str, bind: str | None) -> str:
    """Return the address of this machine on which a backend with this `bind` listens."""
    names = [name for _, name in socket.if_nameindex()]
    if bind is not None and bind not in names:
        names.append(bind)  # it may be an address label, such as "eth0:1"
    return choose(who, bind, _own_addresses(names), _routed_address() if bind is None else None)


def _own_addresses(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the addresses of each of these interfaces that is up."""
    table: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):  # a kernel without IPv6
        # Read the table of the calling thread, which may be in a different network namespace than the process.
        table = parse_if_inet6(Path("/proc/thread-self/net/if_inet6").read_text())
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no such interface
                if struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0] & _IFF_UP:
                    found[name] = table.get(name, [])
            if name in found:
                with contextlib.suppress(OSError):  # it has no IPv4 address
                    found[name].insert(0, socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    return found


def _routed_address() -> str | None:
    """Return the address from which this machine's routes would reach others; None if there is no route."""
    for family, outside in _OUTSIDE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 1))
            address = str(probe.getsockname()[0])
            if not _is_link_local(address):
                return address
    return None
