"""Build a Debian container image, and run it with podman. The base system is bootstrapped once and cached.

Containers see this interpreter and its packages under their own paths, read-only, and use the network of the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kube import _remove_cgroups, default_cache

PACKAGES = {"debootstrap": "/usr/sbin/debootstrap", "podman": "/usr/bin/podman", "runc": "/usr/sbin/runc"}
INCLUDE = "python3"  # for the libraries that an interpreter needs
IMAGE = "clusterenv-node:1"
MARK = Path("/etc/clusterenv-image")
"""A file that only the image has."""


def _call(*command: object, **kwargs: Any) -> str:
    """Run a command and return its output; raise with its messages on failure."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, stdin=subprocess.DEVNULL, **kwargs)
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}".strip()[-4000:]
        raise RuntimeError(f"{' '.join(words)} failed ({done.returncode}): {said}")
    return done.stdout


def install() -> None:
    """Install missing packages. Needs root, and Debian's packages."""
    if missing := [package for package, file in PACKAGES.items() if not Path(file).exists()]:
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _call("apt-get", "update", "--quiet", env=env)
        _call("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *missing, env=env)


def base(cache: Path | None = None) -> Path:
    """Return an archive of a minimal Debian; the first call makes it, which takes one or two minutes."""
    cache = cache or default_cache()
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]  # of this machine, whose libraries fit
    archive = cache / f"debian-{codename}.tar"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "debian.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install()
        if not archive.exists():
            tree, made = Path(work, "tree"), Path(work, "made.tar")
            mirror = _mirror(codename)
            _call("debootstrap", "--variant=minbase", f"--include={INCLUDE}", codename, tree, *mirror)
            tree.joinpath(*MARK.parts[1:]).write_text("made for the tests\n")
            unused = [f"--exclude=./{path}/*" for path in ("usr/share/doc", "var/cache/apt", "var/lib/apt/lists")]
            _call("tar", "--create", "--file", made, "--directory", tree, *unused, ".")
            made.rename(archive)
    return archive


def _mirror(codename: str) -> list[str]:
    """Return this machine's package mirror; empty: debootstrap uses its default."""
    command = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {codename}")
    return _call(*command).split()[:1]


class Podman:
    """Context manager: podman with a separate storage that contains the image."""

    def __enter__(self) -> Podman:
        archive = base()
        self.folder = Path(tempfile.mkdtemp(prefix="clusterenv-podman-"))
        self._cgroup = f"/{self.folder.name}"
        places = (f"--root={self.folder}/root", f"--runroot={self.folder}/run", f"--tmpdir={self.folder}/tmp")
        # crun refuses machines with both versions of cgroups.
        self._podman = ["podman", *places, "--cgroup-manager=cgroupfs", "--runtime=runc", "--events-backend=none"]
        try:
            _call(*self._podman, "import", archive, IMAGE)
        except BaseException:
            self.__exit__()
            raise
        return self

    def command(self, mounts: Sequence[Path]) -> list[str]:
        """Return the command that runs a container; append the program. `mounts` are readable there."""
        packages = [path for path in map(Path, sys.path) if path.is_dir()]
        outside = [path for path in packages if not path.is_relative_to(sys.base_prefix)]
        volumes = [f"--volume={path}:{path}:ro" for path in (Path(sys.base_prefix), *outside, *mounts)]
        # Podman's defaults are higher than root may set if this machine is itself a container.
        limits = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=20000:20000"]
        own = ["--rm", "--network=host", "--log-driver=none", f"--cgroup-parent={self._cgroup}", *limits]
        return [*self._podman, "run", *own, *volumes, f"--env=PYTHONPATH={':'.join(map(str, packages))}", IMAGE]

    def containers(self) -> list[str]:
        """Return the ids of all containers, running or not."""
        return _call(*self._podman, "ps", "--all", "--quiet").split()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):
            _call(*self._podman, "rm", "--all", "--force", "--time=0")
        _remove_cgroups(self.folder.name)
        for mount in Path("/proc/self/mounts").read_text().splitlines():
            if (place := mount.split()[1]).startswith(f"{self.folder}/"):
                _call("umount", place)
        shutil.rmtree(self.folder)
