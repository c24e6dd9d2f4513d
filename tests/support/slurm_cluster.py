"""Run a real SLURM on this machine: a controller, an authentication daemon, and nodes that are `slurmd` processes.

All files are in one temporary folder; the daemons listen on loopback and are ended by process id.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ports import free_ports

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]


def install() -> None:
    """Install missing packages. Needs root, and Debian's packages."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged"))):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        quiet: Any = {"check": True, "stdout": subprocess.DEVNULL, "env": env}
        subprocess.run(["apt-get", "update", "--quiet"], **quiet)
        subprocess.run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *PACKAGES], **quiet)


class SlurmCluster:
    """Context manager: `nodes` nodes of two cores each; sets `SLURM_CONF` to its configuration."""

    def __init__(self, nodes: int = 4) -> None:
        self.names = [f"node{i + 1}" for i in range(nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._before = os.environ.get("SLURM_CONF")

    def __enter__(self) -> SlurmCluster:
        install()
        self.folder = Path(tempfile.mkdtemp(prefix="clusterenv-slurm-"))
        self.folder.chmod(0o755)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        ports = free_ports(1 + len(self.names))
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        self._daemon(
            "munged",
            "--foreground",
            f"--socket={munge}/socket",
            f"--key-file={munge}/key",
            f"--pid-file={munge}/pid",
            f"--seed-file={munge}/seed",
            f"--log-file={munge}/log",
            user="munge",
        )
        conf = self.folder / "slurm.conf"
        conf.write_text(_conf(self.folder, ports, self.names))
        os.environ["SLURM_CONF"] = str(conf)
        (self.folder / "state").mkdir()
        self._await(lambda: (munge / "socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-f", str(conf))
        for name in self.names:
            self.start_node(name)
        self._await(lambda: self.states().count("idle") == len(self.names), "nodes")

    @property
    def pids(self) -> set[int]:
        return {daemon.pid for daemon in self._daemons.values()}

    @property
    def controller(self) -> int:
        return self._daemons["slurmctld"].pid

    def start_node(self, name: str) -> None:
        self._daemon("slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), label=name)

    def kill_node(self, name: str) -> None:
        """Kill a node: its daemon, and all that it runs."""
        victims = [self._daemons.pop(name)]
        marks = [f"SLURMD_NODENAME={name}".encode()]
        pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]
        for pid in pids:
            try:
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            mine = f"SLURM_CONF={self.folder}".encode()
            ours = any(entry.startswith(mine) for entry in env)
            if ours and (marks[0] in env or (b"slurmstepd" in line and name in self._steps_of(pid))):
                os.kill(pid, 9)
        for victim in victims:
            victim.kill()
            victim.wait()

    def _steps_of(self, pid: int) -> str:
        """Return the command line of the daemon that started a slurmstepd, which names its node."""
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            return Path(f"/proc/{parent}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            return ""

    def states(self) -> list[str]:
        done = subprocess.run(["sinfo", "--noheader", "--Node", "--format=%t"], capture_output=True, text=True)
        return done.stdout.split()

    def queue(self) -> list[str]:
        """Return the jobs that wait or run."""
        done = subprocess.run(["squeue", "--noheader", "--format=%i %T %j"], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def _daemon(self, *command: str, user: str | None = None, label: str | None = None) -> None:
        with (self.folder / f"{label or command[0]}.out").open("ab") as log:
            self._daemons[label or command[0]] = subprocess.Popen(
                # A test run that is killed takes its cluster with it.
                ["setpriv", "--pdeathsig", "TERM", "--", shutil.which(command[0]) or command[0], *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=user,
                group=user,
                start_new_session=True,
            )

    def _await(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            over = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if over or time.monotonic() > deadline:
                logs = "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.out")))
                raise RuntimeError(f"SLURM: {what} did not come up; ended: {over}\n{logs}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        if self.queue_is_there():
            subprocess.run(["scancel", "--user=root"], capture_output=True)
            deadline = time.monotonic() + 15
            while self.queue() and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        if self._before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = self._before
        shutil.rmtree(self.folder, ignore_errors=True)

    def queue_is_there(self) -> bool:
        controller = self._daemons.get("slurmctld")
        return controller is not None and controller.poll() is None


def _conf(folder: Path, ports: list[int], names: list[str]) -> str:
    nodes = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN"
        for name, port in zip(names, ports[1:], strict=True)
    )
    return f"""
ClusterName=clusterenv
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
KillWait=5
MinJobAge=30
SlurmdTimeout=10
OverTimeLimit=0
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes={",".join(names)} Default=YES MaxTime=INFINITE State=UP
"""


if __name__ == "__main__":
    with SlurmCluster() as cluster:
        print(f"export SLURM_CONF={cluster.folder}/slurm.conf", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()
