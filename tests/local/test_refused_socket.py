"""A node whose key is refused before it has said anything: its messages go nowhere, and it learns why."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import zmq

from clusterenv.transport.keys import make_keys
from clusterenv.transport.sockets import HeadSocket, NodeSocket

pytestmark = pytest.mark.guarantee(21)


def test_a_node_that_is_refused_before_its_first_message():
    keys = make_keys()
    with (
        closing(HeadSocket("127.0.0.1", (0,), keys, frame_limit=1 << 20, dead_after_s=2.0)) as head,
        closing(NodeSocket(head.address, keys.public, make_keys(), dead_after_s=60.0)) as node,
    ):
        poller, why, deadline = zmq.Poller(), None, time.monotonic() + 30
        node.poll_on(poller)
        while why is None and time.monotonic() < deadline:
            head.receive()
            why = node.ended(dict(poller.poll(20)))
        assert why == "refused"
        time.sleep(0.1)  # libzmq removes what was to be sent there
        node.send([b"hello"])
        assert head.receive() == []
