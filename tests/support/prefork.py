"""Start fork servers and the agents of `Loopback` by forking a process that has imported their code already.

A start costs half a second of CPU, nearly all of it for imports, and the tests of one machine make over a thousand.
Only what a test's own process starts is started so: scripts that tests run, nodes in namespaces and clusters, and the
fork servers of agents start as users' do. `CLUSTERENV_REAL_STARTS=1` turns this off.

Imitates the parts of `subprocess` that `worker_processes.py` and `launch/logs.py` use.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

_SERVER = "clusterenv.worker.forkserver"
_NODE = ("clusterenv", "node")
_SUPPORT = str(Path(__file__).parent)
_END_S = 60.0

_parent: subprocess.Popen[bytes] | None = None
_address = b""
_agents: list[Process] = []


def start() -> None:
    """Start the process that forks, and use it for what this process starts from now on."""
    global _parent, _address
    if _parent is not None or os.environ.get("CLUSTERENV_REAL_STARTS") == "1":
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("")  # an abstract address, chosen by the kernel
        listening.listen(64)
        paths = [_SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]  # another tree than the installed one
        _parent = subprocess.Popen(
            [sys.executable, "-m", "prefork", str(listening.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        _address = listening.getsockname()
    from clusterenv.backends.launch import logs
    from clusterenv.executors import worker_processes

    here: Any = sys.modules[__name__]
    for module in (logs, worker_processes):
        module.subprocess = here  # type: ignore[attr-defined]


def stop() -> None:
    if _parent is not None:
        _parent.communicate(timeout=_END_S)


def own() -> tuple[int | None, str | None]:
    """Return the process and the descriptor that live as long as the tests."""
    if _parent is None:
        return None, None
    assert _parent.stdin is not None
    return _parent.pid, str(_parent.stdin.fileno())


def agents() -> list[psutil.Process]:
    """Return the agents that this process started and that still run, in the order of their numbers."""
    _agents[:] = [agent for agent in _agents if agent.poll() is None]
    forked = {agent.pid: agent.args for agent in _agents}
    started = {child.pid: child.cmdline() for child in psutil.Process().children()}
    key_files = {pid: args[args.index("--join") + 1] for pid, args in (forked | started).items() if "--join" in args}
    return [psutil.Process(pid) for pid in sorted(key_files, key=key_files.__getitem__)]


def Popen(command: Sequence[str], **options: Any) -> Process | subprocess.Popen[bytes]:
    """Fork a fork server or an agent; start everything else as usual."""
    is_server = list(command[:3]) == [sys.executable, "-m", _SERVER]
    is_agent = list(command[:4]) == [sys.executable, "-m", *_NODE]
    if not is_server and not is_agent:
        return subprocess.Popen(command, **options)
    process = Process(list(command), **options)
    if is_agent:
        _agents.append(process)
    return process


class Process:
    """A process that was forked, with the methods of `subprocess.Popen` that are used here."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        env: dict[str, str] | None = None,
        start_new_session: bool,
    ) -> None:
        assert stdin == DEVNULL and start_new_session
        self.args, self.returncode = command, None
        with open(os.devnull, "w") as nothing:  # noqa: PTH123
            outputs = [_descriptor(stdout, 1, nothing), _descriptor(stderr, 2, nothing)]
            self._status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._status.connect(_address)
            work = (command[2:], dict(os.environ) if env is None else env, str(Path.cwd()))
            memory = os.memfd_create("prefork")  # the environment may be larger than a packet
            with os.fdopen(memory, "w+b") as file:
                pickle.dump(work, file)
                file.flush()
                socket.send_fds(self._status, [b"start"], [file.fileno(), *outputs, *pass_fds])
        self.pid = int(self._status.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._status.recv(100) or b"-9")
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _descriptor(given: Any, inherited: int, nothing: Any) -> int:
    if given is None:
        return inherited
    return int(nothing.fileno() if given == DEVNULL else given.fileno())


# -- the process that forks ----------------------------------------------------------------------------------------


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    for module in (_SERVER, "clusterenv.cli", "clusterenv.node.agent", "gymnasium.envs.classic_control"):
        importlib.import_module(module)
    gc.freeze()
    children: dict[int, tuple[int, socket.socket]] = {}  # pidfd → process, and where its status is awaited
    while True:
        ready, _, _ = select.select([0, listening, *children], [], [])
        for fd in ready:
            if fd == 0:
                return
            if fd is listening:
                client, _ = listening.accept()
                pid = _fork(
                    client, [listening.fileno(), *children, *(other.fileno() for _, other in children.values())]
                )
                children[os.pidfd_open(pid)] = (pid, client)
                client.send(str(pid).encode())
            else:
                pid, client = children.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(fd)
                with client, contextlib.suppress(OSError):
                    client.send(str(code).encode())


def _fork(client: socket.socket, ours: list[int]) -> int:
    _, fds, _, _ = socket.recv_fds(client, 10, 32)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    code = 1
    try:
        memory, out, error, *control = fds
        with os.fdopen(memory, "rb") as file:
            file.seek(0)
            (module, *args), env, folder = pickle.load(file)
        os.setsid()
        for fd in (client.detach(), *ours):
            os.close(fd)
        for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (error, 2)):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(folder)
        code = _serve(control[0]) if module == _SERVER else _run_agent(args, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(control: int) -> int:
    sys.argv = [_SERVER, str(control)]
    sys.modules[_SERVER].main()
    return 0


def _run_agent(args: list[str], folder: str) -> int:
    """Run `python -m clusterenv` with these arguments, and return its exit code."""
    sys.argv = ["clusterenv", *args]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [folder, *paths, *(path for path in sys.path[1:] if path != _SUPPORT)]
    try:
        code = sys.modules["clusterenv.cli"].main()
    except SystemExit as ended:
        code = ended.code
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code or 0


if __name__ == "__main__":
    main()
