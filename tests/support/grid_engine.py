"""Run a real Grid Engine on this machine: a master and an execution daemon, from Debian's packages.

The packages are unpacked, not installed, into one temporary folder, which also has all files of the cell. The daemons
are ended by process id; nothing else of the machine is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ports import free_ports

PACKAGES = ["master", "exec", "client", "common"]
LIBRARIES = ["libhwloc15", "libjemalloc2", "libmunge2"]
PROGRAMS = ["qsub", "qstat", "qdel", "qconf", "qmod", "qhost"]
SLOTS = 4
NOTIFY_S = 20


class GridEngine:
    """Context manager: one host with a queue of `SLOTS` slots; sets PATH and the variables of the cell."""

    def __init__(self) -> None:
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> GridEngine:
        self.folder = Path(tempfile.mkdtemp(prefix="clusterenv-sge-"))
        self.folder.chmod(0o755)
        try:
            unpack(self.folder / "packages")
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        master, execution = free_ports(2)
        self.host = socket.gethostname()
        self._programs = self.folder / "packages/usr/lib/gridengine"
        self._share = self.folder / "packages/usr/share/gridengine"
        libraries = next((self.folder / "packages/usr/lib").glob("*-linux-gnu*"))
        self._libraries = f"{libraries}:{self._programs}"
        self._make_cell()
        self._set("SGE_ROOT", str(self.folder / "root"))
        self._set("SGE_CELL", "default")
        self._set("SGE_QMASTER_PORT", str(master))
        self._set("SGE_EXECD_PORT", str(execution))
        self._set("PATH", f"{self._make_wrappers()}:{os.environ['PATH']}")
        self._fill_spool()
        self._daemon("sge_qmaster")
        self._await(lambda: self._tried("qconf", "-sconf"), "sge_qmaster")
        self._tried("qconf", "-ah", self.host)  # refused if it is one already, as the host of the master
        self._run("qconf", "-as", self.host)
        self._configure()
        self._daemon("sge_execd")
        self._await(self._is_ready, "the queue")

    def _is_ready(self) -> bool:
        lines = [line.split() for line in self._run("qstat", "-f").splitlines() if line.startswith("all.q@")]
        return bool(lines) and len(lines[0]) == 5  # a sixth column has the states of a queue that is not usable

    def _make_cell(self) -> None:
        root, spool = self.folder / "root", self.folder / "spool"
        arch = subprocess.run([self._share / "util/arch"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("bin", "utilbin", "lib"):
            (root / name).mkdir(parents=True)
            (root / name / arch).symlink_to(self._programs)
        (root / "util").symlink_to(self._share / "util")
        common = root / "default/common"
        for path in (common, spool / "qmaster/job_scripts", spool / "execd"):
            path.mkdir(parents=True)
        self._spooling = ["classic", "libspoolc", f"{common};{spool / 'qmaster'}"]
        (common / "act_qmaster").write_text(f"{self.host}\n")
        # The host's name may resolve to a loopback address, and that address to "localhost".
        (common / "host_aliases").write_text(f"{self.host} localhost\n")
        (common / "bootstrap").write_text(
            f"""
admin_user              none
default_domain          none
ignore_fqdn             true
spooling_method         {self._spooling[0]}
spooling_lib            {self._spooling[1]}
spooling_params         {self._spooling[2]}
binary_path             {root / "bin"}
qmaster_spool_dir       {spool / "qmaster"}
security_mode           none
listener_threads        2
worker_threads          2
scheduler_threads       1
"""
        )

    def _make_wrappers(self) -> Path:
        """Return a folder with the commands that users run, which find the unpacked libraries."""
        folder = self.folder / "bin"
        folder.mkdir()
        for name in PROGRAMS:
            text = f'#!/bin/sh\nLD_LIBRARY_PATH="{self._libraries}" exec "{self._programs / name}" "$@"\n'
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return folder

    def _fill_spool(self) -> None:
        resources = self._share / "util/resources"
        conf = _changed(
            (self._share / "default-configuration").read_text(),
            execd_spool_dir=self.folder / "spool/execd",
            mailer="/bin/true",
            min_uid=0,
            min_gid=0,
            execd_params="SHARETREE_RESERVED_USAGE=false",
            reporting_params="accounting=false reporting=false",
        )
        (self.folder / "conf").write_text(conf)
        self._own("spoolinit", *self._spooling, "init")
        self._own("spooldefaults.bin", "configuration", str(self.folder / "conf"))
        self._own("spooldefaults.bin", "complexes", str(resources / "centry"))
        self._own("spooldefaults.bin", "usersets", str(resources / "usersets"))
        self._own("spooldefaults.bin", "managers", "root")

    def _configure(self) -> None:
        scheduler = _changed(
            self._run("qconf", "-ssconf"),
            schedule_interval="0:0:1",
            flush_submit_sec=1,
            flush_finish_sec=1,
            schedd_job_info="true",
        )
        queue = _changed(
            self._run("qconf", "-sq"),
            qname="all.q",
            hostlist=self.host,
            load_thresholds="NONE",
            pe_list="NONE",
            slots=SLOTS,
            notify=f"00:00:{NOTIFY_S}",
        )
        for option, text in (("-Msconf", scheduler), ("-Aq", queue)):
            (self.folder / "text").write_text(text)
            self._run("qconf", option, str(self.folder / "text"))

    @property
    def pids(self) -> set[int]:
        return {daemon.pid for daemon in self._daemons.values()}

    @property
    def master(self) -> int:
        return self._daemons["sge_qmaster"].pid

    def queue(self) -> list[str]:
        """Return the jobs that wait or run."""
        return [line for line in self._run("qstat").splitlines() if line.split()[0].isdecimal()]

    # -- inside -----------------------------------------------------------------------------------------------

    def _set(self, name: str, value: str) -> None:
        self._before[name] = os.environ.get(name)
        os.environ[name] = value

    def _env(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": self._libraries, "SGE_ND": "1"}  # SGE_ND: stay in the foreground

    def _own(self, program: str, *words: str) -> None:
        done = subprocess.run([self._programs / program, *words], capture_output=True, text=True, env=self._env())
        assert done.returncode == 0, (program, done.stdout, done.stderr)

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def _tried(self, *command: str) -> bool:
        return subprocess.run(command, capture_output=True).returncode == 0

    def _daemon(self, name: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                # A test run that is killed takes its cluster with it.
                ["setpriv", "--pdeathsig", "TERM", "--", str(self._programs / name)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env(),
                start_new_session=True,
            )

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            over = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if over or time.monotonic() > deadline:
                logs = "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.out")))
                raise RuntimeError(f"Grid Engine: {what} did not come up; ended: {over}\n{logs}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) == 2 and all(daemon.poll() is None for daemon in self._daemons.values()):
            self._tried("qdel", "-f", "-u", "*")
            with contextlib.suppress(AssertionError):
                deadline = time.monotonic() + 15
                while self.queue() and time.monotonic() < deadline:
                    time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self.folder, ignore_errors=True)


def unpack(folder: Path) -> None:
    """Download Debian's packages and unpack them. Needs root for `apt-get update`, if there are no lists yet."""
    folder.mkdir()
    names = [*(f"gridengine-{name}" for name in PACKAGES), *LIBRARIES]
    download = ["apt-get", "download", "--quiet", *names]
    if subprocess.run(download, cwd=folder, capture_output=True).returncode != 0:
        subprocess.run(["apt-get", "update", "--quiet"], check=True, capture_output=True)
        subprocess.run(download, cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        package.unlink()
    # These programs open the spooling library below a fixed path; without it, they find ours by LD_LIBRARY_PATH.
    fixed = b"/usr/lib/gridengine/%s%s\0"
    for name in ("sge_qmaster", "spoolinit", "spooldefaults.bin"):
        program = folder / "usr/lib/gridengine" / name
        content = program.read_bytes()
        assert content.count(fixed) == 1, f"{name} has changed: it does not have {fixed!r} once"
        program.write_bytes(content.replace(fixed, b"%s%s\0".ljust(len(fixed), b"\0")))


def _changed(text: str, **values: object) -> str:
    """Return a configuration of Grid Engine, a name and a value in each line, with these values."""
    lines = [line for line in text.splitlines() if line.split() and line.split()[0] not in values]
    return "\n".join([*lines, *(f"{name} {value}" for name, value in values.items()), ""])


if __name__ == "__main__":
    with GridEngine() as engine:
        names = ("SGE_ROOT", "SGE_CELL", "SGE_QMASTER_PORT", "SGE_EXECD_PORT", "PATH")
        print("\n".join(f"export {name}={os.environ[name]}" for name in names), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()
