"""`check_machine`: look at this machine, and judge with `checks.py` whether it can run ClusterEnv and reach schedulers.

Every external command has a few seconds; the schedulers are asked at the same time.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from clusterenv.backends.launch.addresses import listening_address
from clusterenv.errors import ClusterEnvError
from clusterenv.monitor.doctor import checks
from clusterenv.monitor.doctor.checks import Answer, Check
from clusterenv.system.cpus import own_quota, read_text
from clusterenv.system.host_load import load_average
from clusterenv.system.memory import machine_memory, own_group_memory

__all__ = ["check_machine"]

COMMAND_S = 4.0
"""How long a scheduler may take to answer. Those in good health answer within a second."""

_KUBECTL = ["kubectl", "version", f"--request-timeout={COMMAND_S - 1:g}s"]


def check_machine() -> list[Check]:
    """Return what was seen on this machine, each with its status and what to do."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        schedulers = [pool.submit(look) for look in (_slurm, _kubernetes, _ray)]
        versions = {name: _version(name) for name in (*checks.NEEDED, *checks.OPTIONAL)}
        home, temporary = Path("~/.clusterenv").expanduser(), Path(tempfile.gettempdir())
        return [
            checks.python(tuple(sys.version_info[:3])),
            *checks.packages(versions),
            checks.optional_packages(versions),
            checks.cores(len(os.sched_getaffinity(0)), own_quota(), load_average(), os.cpu_count() or 1),
            checks.memory(*machine_memory(), own_group_memory()),
            checks.open_files(*_open_files()),
            checks.shared_memory(_free(Path("/dev/shm"))),
            checks.disk("~/.clusterenv", str(home), _free(_existing(home)), _is_writable(_existing(home))),
            checks.disk("temporary files", str(temporary), _free(temporary), _is_writable(temporary)),
            checks.address(*_address()),
            *(future.result() for future in schedulers),
        ]


# -- this machine -------------------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _open_files() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, hard


def _existing(path: Path) -> Path:
    """Return the path, or the nearest parent that exists: it would be created there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


def _address() -> tuple[str | None, str, tuple[int, int] | None]:
    """Return the address that nodes would dial, why it cannot be used, and the ports that it would be given."""
    try:
        found = listening_address("Remote", None)
    except ClusterEnvError as error:
        return None, str(error), None
    ports = (read_text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    try:
        with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET) as probe:
            probe.bind((found, 0))
            probe.listen(1)
    except OSError as error:
        return found, f"{found} cannot be listened on: {error}", None
    return found, "", (int(ports[0]), int(ports[1])) if len(ports) == 2 else None


# -- schedulers ---------------------------------------------------------------------------------------------------


def _slurm() -> Check:
    if shutil.which("sbatch") is None:
        return checks.scheduler("SLURM", Answer(False), COMMAND_S, "")
    advice = "check it by hand with `squeue`; slurmctld may be down, or this machine not one of its hosts"
    return checks.scheduler("SLURM", _ask(["squeue", "--me", "--format=%i|%T|%r"]), COMMAND_S, advice)


def _kubernetes() -> Check:
    if shutil.which("kubectl") is None:
        return checks.scheduler("Kubernetes", Answer(False), COMMAND_S, "")
    advice = "check it by hand with `kubectl get pods`: the context, the VPN, or expired credentials"
    found = checks.scheduler("Kubernetes", _ask(_KUBECTL), COMMAND_S, advice)
    # kubectl comes with other programs: without a cluster, it is installed but not used.
    return replace(found, status=checks.Status.WARNING) if found.status is checks.Status.PROBLEM else found


def _ray() -> Check:
    """Connect to the address of the Ray cluster, if one is set: `ray status` takes longer than the rest together."""
    where = os.environ.get("RAY_ADDRESS") or (read_text("/tmp/ray/ray_current_cluster") or "").strip()
    host, _, port = where.rpartition("://")[2].rpartition(":")
    if _version("ray") is None or not (host and port.isdigit()):
        seen = "not installed" if _version("ray") is None else "installed; Ray() starts a cluster on this machine"
        return Check("Ray", checks.Status.OK, seen)
    try:
        with socket.create_connection((host, int(port)), COMMAND_S):
            answer = Answer(True, 0, f"{where} accepts connections")
    except TimeoutError:
        answer = Answer(True)
    except OSError as error:
        answer = Answer(True, 1, f"{where}: {error}")
    return checks.scheduler("Ray", answer, COMMAND_S, "check it by hand with `ray status`, or unset RAY_ADDRESS")


def _ask(command: list[str]) -> Answer:
    """Run a command for a few seconds; what it starts itself is ended with it."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(True, 127, str(error))
    with process:
        try:
            text, _ = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Answer(True)
    return Answer(True, process.returncode, text)
