"""Where the head listens, what nodes dial, and how a node's process ends: decisions, then real connections."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.backends import cluster as network
from clusterenv.backends.launch import addresses
from clusterenv.cluster.ending import Ending
from clusterenv.transport.keys import read_joining
from namespace_cluster import Namespaces, Proxy, agent_command
from netns import Network

ID = "CartPole-v1"
on_network = pytest.mark.network


# -- decisions ----------------------------------------------------------------------------------------------------

LOOPBACK = {"lo": ["127.0.0.1", "::1"]}


@pytest.mark.parametrize(
    ("bind", "own", "routed", "expected"),
    [
        (None, {**LOOPBACK, "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]}, "10.1.0.1", "10.1.0.1"),
        (None, {**LOOPBACK, "eth0": ["10.0.0.1"]}, None, "10.0.0.1"),
        (None, {**LOOPBACK, "eth0": ["10.0.0.1", "fd00::1"]}, None, "10.0.0.1"),
        (None, {**LOOPBACK, "eth0": ["fd00::1"]}, None, "fd00::1"),
        (None, {**LOOPBACK, "eth0": ["fe80::1", "fd00::1"]}, None, "fd00::1"),
        ("eth0", {**LOOPBACK, "eth0": ["10.0.0.1", "fd00::1"]}, "10.1.0.1", "10.0.0.1"),
        ("eth0", {**LOOPBACK, "eth0": ["fe80::1", "fd00::1"]}, "10.1.0.1", "fd00::1"),
        ("lo", LOOPBACK, "10.1.0.1", "127.0.0.1"),
        ("::1", LOOPBACK, None, "::1"),
        ("FD00:0::0001", LOOPBACK, None, "fd00::1"),
        ("[fd00::1]", LOOPBACK, None, "fd00::1"),
        ("127.0.0.2", LOOPBACK, None, "127.0.0.2"),
    ],
)
def test_the_address_to_listen_on(bind, own, routed, expected):
    assert addresses.choose("Slurm", bind, own, routed) == expected


@pytest.mark.parametrize(
    ("bind", "own", "error", "message"),
    [
        (None, LOOPBACK, ce.StartError, r"Slurm\(bind=None\): .* only loopback.*bind='127\.0\.0\.1'"),
        (None, {**LOOPBACK, "eth0": ["fe80::1"]}, ce.StartError, r"Slurm\(bind=None\): .* only loopback"),
        (
            None,
            {**LOOPBACK, "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]},
            ce.StartError,
            r"Slurm\(bind=None\): .* several addresses: eth0 10\.0\.0\.1, ib0 10\.1\.0\.1.*bind='eth0'",
        ),
        ("wlan0", {**LOOPBACK, "eth0": ["10.0.0.1"]}, ce.SpecError, r"bind='wlan0'.*\['lo', 'eth0'\]"),
        ("eth0", {**LOOPBACK, "eth0": ["fe80::1"]}, ce.SpecError, r"bind='eth0'"),
        ("fe80::1", LOOPBACK, ce.SpecError, r"bind='fe80::1'.*link-local"),
        ("0.0.0.0", LOOPBACK, ce.SpecError, r"bind='0\.0\.0\.0'.*every network"),
        ("::", LOOPBACK, ce.SpecError, r"bind='::'.*every network"),
        ("*", LOOPBACK, ce.SpecError, r"bind='\*'.*every network"),
    ],
)
def test_addresses_that_nodes_could_not_dial(bind, own, error, message):
    with pytest.raises(error, match=message):
        addresses.choose("Slurm", bind, own, None)


def test_the_kernels_table_of_ipv6_addresses():
    table = """\
fd000000000000000000000000000002 04 40 00 82     eth0
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
fd000000000000000000000000000003 04 40 00 c2     eth0
fd000000000000000000000000000004 04 40 00 88     eth0
"""
    # The last two are tentative, and a duplicate of another machine's: the kernel would not listen on either.
    assert addresses.parse_if_inet6(table) == {"eth0": ["fd00::2", "fe80::fc:ff:fe00:1"], "lo": ["::1"]}


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        (None, "tcp://10.0.0.1:4711"),
        ("login1", "tcp://login1:4711"),
        ("login1.example.org:80", "tcp://login1.example.org:80"),
        ("192.0.2.1:5000", "tcp://192.0.2.1:5000"),
        ("fd00::1", "tcp://[fd00::1]:4711"),
        ("[fd00::1]", "tcp://[fd00::1]:4711"),
        ("[FD00:0::1]:5000", "tcp://[fd00::1]:5000"),
    ],
)
def test_the_address_that_nodes_dial(advertise, expected):
    assert addresses.dialled("tcp://10.0.0.1:4711", addresses.parse_advertise(advertise)) == expected


@pytest.mark.parametrize(
    "advertise",
    [
        "",
        "0.0.0.0:80",
        "*:80",
        "::",
        "host:",
        "host:0",
        "host:65536",
        "host:port",
        "a b",
        "tcp://host:1",
        "fe80::1",
        80,
    ],
)
def test_an_advertised_address_that_is_none(advertise):
    with pytest.raises(ce.SpecError, match=rf"Manual\(advertise={re.escape(repr(advertise))}\): .*host:port"):
        ce.Manual(nodes=1, advertise=advertise)


@pytest.mark.parametrize(("port", "ports"), [(0, [0]), (4711, [4711]), ((5, 7), [5, 6, 7]), ([9, 9], [9])])
def test_ports(port, ports):
    assert list(addresses.parse_port(port)) == ports


@pytest.mark.parametrize("port", [-1, 65536, (7, 5), (0, 5), (5, 65536), (5,), "80", True, 4.5])
def test_ports_that_are_none(port):
    with pytest.raises(ce.SpecError, match=rf"Ray\(port={re.escape(repr(port))}\): .*\(low, high\)"):
        ce.Ray(nodes=1, port=port)


def test_interface_is_another_name_of_bind():
    assert ce.Slurm(nodes=1, interface="ib0") == ce.Slurm(nodes=1, bind="ib0")
    with pytest.raises(ce.SpecError, match=r"Slurm\(interface='ib0', bind='eth0'\)"):
        ce.Slurm(nodes=1, interface="ib0", bind="eth0")


# -- how a run ends -----------------------------------------------------------------------------------------------


def test_an_exception_under_way_is_what_ends_a_run():
    assert Ending().error() == ""
    ending = Ending()
    try:
        raise ValueError("not a number")
    except ValueError:
        assert ending.error() == "ValueError: not a number"
        assert Ending().error() == "", "handled when the run began, so it is not what ends it"
    assert ending.error() == ""


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (SystemExit(), ""),
        (SystemExit(0), ""),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), ""),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Unprintable(), "test_addresses.Unprintable: <exception str() failed>"),
    ],
)
def test_what_nodes_are_told_of_an_exception(end, expected):
    ending = Ending()
    try:
        raise end
    except BaseException:
        assert ending.error() == expected


HEAD = """
import sys, numpy as np, clusterenv as ce
print(sys.argv[1:], flush=True)
backend = ce.Manual(nodes=1, bind="127.0.0.1", folder=sys.argv[1], heartbeat_s=(0.2, 1.0, 1.5), oversubscribe=True)
envs = ce.ClusterEnv("CartPole-v1", 2, backend=backend)
envs.reset(seed=1)
print("running", flush=True)
how = sys.stdin.readline().strip()
if how == "return":
    sys.exit()
elif how == "raise":
    raise RuntimeError("the loss is NaN")
with envs:
    if how == "raise within with":
        raise RuntimeError("the loss is NaN")
"""


@on_network
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("close", 0, "the run is over"),
        ("return", 0, "the run is over"),
        ("raise", 1, "the run failed: RuntimeError: the loss is NaN"),
        ("raise within with", 1, "the run failed: RuntimeError: the loss is NaN"),
        ("kill", 1, "no head for"),
    ],
)
def test_a_node_says_that_it_joined_and_how_the_run_ended(tmp_path, how, code, said):
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", HEAD, str(tmp_path)]
        head = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        stack.callback(head.kill)
        deadline = time.monotonic() + 60
        while not (found := [path for path in tmp_path.glob("*/node-0.key") if path.stat().st_size]):
            assert time.monotonic() < deadline and head.poll() is None
            time.sleep(0.02)
        address = read_joining(found[0]).address
        node = stack.enter_context(subprocess.Popen(agent_command(found[0]), stderr=pipe, text=True))
        stack.callback(node.kill)
        while head.stdout.readline() != "running\n":
            assert head.poll() is None
        if how == "kill":
            head.kill()
        else:
            head.stdin.write(f"{how}\n")
            head.stdin.flush()
        log = node.communicate(timeout=60)[1]
        head.wait(timeout=60)
        assert re.search(rf"joined the run at {re.escape(address)} as node 0.*\n.*slots 0-1 ", log)
        assert node.returncode == code and said in log, log


# -- real connections ---------------------------------------------------------------------------------------------


def zeros(n=4):
    return np.zeros(n, dtype=np.int64)


@pytest.fixture
def net():
    with Network(nodes=2) as made:
        yield made


def addresses_in_key_files(backend):
    return {read_joining(path).address for path in backend.jobs[0].plan.files}


@on_network
@pytest.mark.parametrize("bind", [None, "eth0", "fd77::1"])
def test_machines_with_ipv6_only(net, bind):
    for i, host in enumerate((net.head, *net.nodes)):
        host.ipv6_only(f"fd77::{i + 1}")
    backend = Namespaces(net, bind=bind)
    with ce.ClusterEnv(ID, 4, backend=backend) as envs:
        (address,) = addresses_in_key_files(backend)
        assert re.fullmatch(r"tcp://\[fd77::1\]:\d+", address)
        envs.reset(seed=1)
        assert envs.step(zeros())[0].shape == (4, 4)


@on_network
def test_without_a_route_the_only_address_is_taken(net):
    backend = Namespaces(net, bind=None)
    with ce.ClusterEnv(ID, 4, backend=backend) as envs:
        assert all(address.startswith(f"tcp://{net.head.address}:") for address in addresses_in_key_files(backend))
        envs.reset(seed=1)


@on_network
def test_without_any_network_the_head_does_not_take_loopback(net):
    net.head.unplug()
    with pytest.raises(ce.StartError, match=r"Manual\(bind=None\): .* only loopback"):
        net.head.call(ce.ClusterEnv, ID, 2, backend=ce.Manual(nodes=1, start_timeout_s=1))


@on_network
def test_a_port_range_of_which_some_are_taken(net):
    import socket

    with contextlib.ExitStack() as stack:
        for port in (4000, 4001):
            stack.enter_context(net.head.call(socket.create_server, (net.head.address, port)))
        backend = Namespaces(net, port=(4000, 4002))
        with ce.ClusterEnv(ID, 4, backend=backend) as envs:
            assert addresses_in_key_files(backend) == {f"tcp://{net.head.address}:4002"}
            envs.reset(seed=1)
            manual = ce.Manual(nodes=1, bind="eth0", port=(4000, 4002), start_timeout_s=1)
            with pytest.raises(ce.StartError, match=rf"cannot listen on {net.head.address}: .* 4000 to 4002 .* in use"):
                net.head.call(ce.ClusterEnv, ID, 2, backend=manual)


@on_network
def test_an_address_of_another_machine(net):
    manual = ce.Manual(nodes=1, bind=net.nodes[0].address, start_timeout_s=1)
    with pytest.raises(ce.StartError, match=rf"cannot listen on {net.nodes[0].address}.*advertise="):
        net.head.call(ce.ClusterEnv, ID, 2, backend=manual)


@on_network
def test_nodes_dial_what_is_advertised(net):
    """Each machine forwards a port of its own to the head: a name, which each of them resolves for itself."""
    with contextlib.ExitStack() as stack:
        target = (net.head.address, 4711)
        proxies = [stack.enter_context(Proxy(host, target, ("127.0.0.1", 5000))) for host in net.nodes]
        backend = Namespaces(net, port=4711, advertise="localhost:5000")
        with ce.ClusterEnv(ID, 4, backend=backend) as envs:
            assert addresses_in_key_files(backend) == {"tcp://localhost:5000"}
            envs.reset(seed=1)
            before = [proxy.counts().to_client for proxy in proxies]
            envs.step(zeros())
            assert all(proxy.counts().to_client > then for proxy, then in zip(proxies, before, strict=True))


@on_network
def test_the_first_line_about_waiting_says_where_the_head_is(monkeypatch, caplog, capfd):
    monkeypatch.setattr(network, "_QUIET_S", 0.0)
    caplog.set_level(logging.INFO, logger="clusterenv")
    backend = ce.Manual(nodes=2, bind="127.0.0.1", port=0, advertise="login1:4711", start_timeout_s=0.5)
    with pytest.raises(ce.StartError, match=r"nodes dial tcp://login1:4711.*listens on tcp://127\.0\.0\.1:\d+"):
        ce.ClusterEnv(ID, 2, backend=backend)
    lines = [line for line in caplog.messages if "waiting" in line]
    assert re.fullmatch(
        r"waiting for 2 nodes at tcp://login1:4711 \(the head listens on tcp://127\.0\.0\.1:\d+\)", lines[0]
    )
    assert "tcp://login1:4711" in capfd.readouterr().err, "beside the commands to run"
