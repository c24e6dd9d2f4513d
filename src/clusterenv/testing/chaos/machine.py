"""Faults of a machine: a disk that is full for a while, and a wall clock that jumps."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from clusterenv.testing.chaos.faults import Fault, Kind
from clusterenv.testing.chaos.injector import Act, Later

__all__ = ["Clock", "disk_acts"]

_JUMPED_S = 5.0
_OFFSET = struct.Struct("d")
_VARIABLE = "CLUSTERENV_CLOCK"

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile double *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLUSTERENV_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) offset = found;
}

static time_t jump(void) { return offset ? (time_t)*offset : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*original)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(clock, now);
    if (!result && clock == CLOCK_REALTIME) now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    int (*original)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int result = original(now, zone);
    if (!result) now->tv_sec += jump();
    return result;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""


class Clock:
    """Sets the wall clock of processes that are started with `environment`, and of no others.

    Needs a C compiler: a small preloaded library overrides the C library's functions.

    Args:
        folder: for the library and for the file that holds the clock's offset.
    """

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock.so"
        compiler = shutil.which("cc")
        if compiler is None:
            raise FileNotFoundError(errno.ENOENT, "a C compiler is needed", "cc")
        command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
        self.environment = {"LD_PRELOAD": str(library), _VARIABLE: str(self._file)}
        self.set(0.0)

    def set(self, offset_s: float) -> None:
        """Shift the clock by this many seconds."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(_OFFSET.pack(offset_s))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Make processes that are started within the block use this clock."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    @property
    def acts(self) -> dict[Kind, Act]:
        """Return the function for the kind `CLOCK`: the clock jumps, and jumps back."""

        def jump(fault: Fault) -> Later:
            self.set(fault.amount)
            return _JUMPED_S, lambda: self.set(0.0)

        return {Kind.CLOCK: jump}


def disk_acts(folder: Path) -> dict[Kind, Act]:
    """Return the function for the kind `DISK_FULL`. It fills the file system of `folder`: use a small separate one."""
    ballast = folder / "ballast"

    def fill(fault: Fault) -> Later:
        with ballast.open("wb", buffering=0) as file:
            for size in (65536, 512, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        return fault.amount, lambda: ballast.unlink(missing_ok=True)

    return {Kind.DISK_FULL: fill}
