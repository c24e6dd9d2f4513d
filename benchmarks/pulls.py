"""Measure a pull of weights once: `PYTHONPATH=. python benchmarks/pulls.py SUBJECT ENV_ID --seconds S`.

`pull`: a policy of 100 MB changes, and a node agent fetches it; measured from the offer until the node has all of it.
`raw-copy`: the same number of bytes between two processes over one encrypted ZeroMQ connection, in frames of 1 MB, only
joined by the receiver. Rates are in bytes, not steps.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import closing
from typing import Any

import torch
import zmq
from torch import nn

import clusterenv as ce
from benchmarks.subjects import Job, Subject, Window, cluster, main

SIZE = 100_000_000
FRAME = 1 << 20


class Heavy(nn.Module):
    """Acts with a small network; the rest of its weights is only sent."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.actor = nn.Linear(width, actions)
        self.ballast = nn.Parameter(torch.rand(SIZE // 4))

    def forward(self, obs: Any) -> Any:
        return self.actor(obs)


def pull(job: Job) -> list[Window]:
    with closing(cluster(job, job.env_id, network=True)) as envs:
        module = Heavy(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
        collector = envs.collector(ce.TorchPolicy(module, dist="categorical"))
        collector.rollout(1)
        pulled, elapsed_s = 0, 0.0
        while elapsed_s < job.seconds:
            with torch.no_grad():
                module.actor.bias.add_(1e-3)
            collector.rollout(1)
            elapsed_s += envs.stats()["pull_s"][0]
            pulled += SIZE
        return [Window(pulled, elapsed_s)]


def raw_copy(job: Job) -> list[Window]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    head_public, head_secret = zmq.curve_keypair()
    with closing(_socket(zmq.PUSH, head_secret, head_public)) as socket:
        socket.curve_server = 1
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        receiver = context.Process(target=_receive, args=(theirs, port, head_public), daemon=True)
        receiver.start()
        data = torch.rand(SIZE // 4).numpy().tobytes()
        pulled, elapsed_s = 0, 0.0
        ours.recv()
        while elapsed_s < job.seconds:
            begin = time.perf_counter()
            for at in range(0, SIZE, FRAME):
                socket.send(memoryview(data)[at : at + FRAME])
            ours.recv()
            elapsed_s += time.perf_counter() - begin
            pulled += SIZE
        receiver.terminate()
        receiver.join()
    return [Window(pulled, elapsed_s)]


def _socket(kind: int, secret: bytes, public: bytes) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.hwm = 0
    socket.curve_secretkey, socket.curve_publickey = secret, public
    return socket


def _receive(pipe: Any, port: int, head_public: bytes) -> None:
    public, secret = zmq.curve_keypair()
    socket = _socket(zmq.PULL, secret, public)
    socket.curve_serverkey = head_public
    socket.connect(f"tcp://127.0.0.1:{port}")
    pipe.send(None)
    got, buffer = 0, bytearray(SIZE)
    while True:
        frame = socket.recv(copy=False).buffer
        buffer[got : got + len(frame)] = frame
        got += len(frame)
        if got >= SIZE:
            got = 0
            pipe.send(None)


PULLS: dict[str, Subject] = {"pull": pull, "raw-copy": raw_copy}

if __name__ == "__main__":
    main(PULLS)
