"""A node that floods the head and is cut off: libzmq must not end the head's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.guarantee(22)

FLOOD = """
import time
from clusterenv.transport.keys import make_keys
from clusterenv.transport.sockets import HeadSocket, NodeSocket

keys, its_own = make_keys(), make_keys()
head = HeadSocket("127.0.0.1", (0,), keys, frame_limit=1 << 20, dead_after_s=2.0)
head.allow(its_own.public)
node = NodeSocket(head.address, keys.public, its_own, dead_after_s=60.0)
node.send([b"hello"])
link = None
while link is None:
    link = next((arrived.link for arrived in head.receive()), None)
    time.sleep(0.01)
for _ in range(20_000):  # far more than may wait: libzmq stops to read this connection
    node.send([b"x" * 100])
time.sleep(0.3)
head.cut(link)
time.sleep(2.5)  # longer than libzmq would wait with a heartbeat
while not head.gone():
    head.receive(most=10_000)
print("alive")
node.close()
head.close()
"""


def test_a_connection_that_ends_while_too_much_of_it_waits_to_be_read():
    done = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "alive\n", (done.returncode, done.stderr)
