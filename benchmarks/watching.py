"""Measure what watching a run costs: `python -m benchmarks.watching [--seconds S] [--num-envs N] [--workers N]`.

A run collects rollouts of CartPole-v1 in this process and serves its page. First nobody looks at it, then one viewer
reads `/stream`, as an open page does. The figures are the CPU seconds of each of the head's own threads, as shares of
one core: other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import clusterenv as ce

VIEWER = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
opener.open(sys.argv[1]).read()
stream = opener.open(sys.argv[1].split("?")[0] + "stream")
print(stream.readline(), flush=True)
while stream.readline():
    pass
"""


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of each of the head's threads but this one, by name."""
    found = {t.name: t.ident for t in threading.enumerate() if t.name.startswith("clusterenv-")}
    return {name: time.clock_gettime(time.pthread_getcpuclockid(ident)) for name, ident in found.items() if ident}


def shares(collector: ce.Collector, seconds: float) -> dict[str, float]:
    """Collect for this long. Return the share of a core that each thread used meanwhile."""
    before, begin = cpu_seconds(), time.monotonic()
    while time.monotonic() < begin + seconds:
        collector.rollout(128)
    lasted_s = time.monotonic() - begin
    return {name: (after - before.get(name, 0.0)) / lasted_s for name, after in cpu_seconds().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, default=None, help="default: one per CPU")
    options = parser.parse_args()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        envs = ce.ClusterEnv("CartPole-v1", options.num_envs, backend=ce.Local(options.workers), dashboard=True)
    (url,) = re.findall(r"the page of this run: (\S+)", said.getvalue())
    with envs, TemporaryDirectory() as folder:
        script = Path(folder) / "viewer.py"
        script.write_text(VIEWER)
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        shares(collector, 3.0)  # the monitor's imports
        rows = {"no viewer": shares(collector, options.seconds)}
        viewer = subprocess.Popen([sys.executable, str(script), url], stdout=subprocess.PIPE)
        assert viewer.stdout is not None and viewer.stdout.readline(), "the viewer got nothing"
        try:
            rows["one viewer"] = shares(collector, options.seconds)
        finally:
            viewer.kill()
            viewer.wait()
    print(f"{options.num_envs} environments; shares of one core")
    for what, found in rows.items():
        parts = ", ".join(f"{name.removeprefix('clusterenv-')} {share:.2%}" for name, share in sorted(found.items()))
        print(f"{what:10}  {sum(found.values()):6.2%}  ({parts})")


if __name__ == "__main__":
    main()
