"""Take the screenshots of docs/monitoring.md from a real run: `python -m tools.screenshots [--seconds 150]`.

Trains `examples/ppo_detach.py`, kills one of its workers on the way, and opens its page in Chromium. Also prints what
the page and its one viewer cost the serving process, in CPU seconds per second.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from clusterenv.monitor import records
from clusterenv.monitor.client import Client, find
from clusterenv.monitor.page.serve import start

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import chromium  # type: ignore[import-not-found]  # noqa: E402

SHOTS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light")}
COST_S = 20.0


def cost() -> float:
    """Return the CPU seconds per second of this process, which serves the page to one viewer."""
    own, begin = psutil.Process(), time.monotonic()
    before = sum(own.cpu_times()[:2])
    time.sleep(COST_S)
    return float(sum(own.cpu_times()[:2]) - before) / (time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page")
    options = parser.parse_args()
    chromium.install()
    with tempfile.TemporaryDirectory() as home:
        os.environ["CLUSTERENV_HOME"] = home
        command = [sys.executable, "examples/ppo_detach.py", "--env-id", "LunarLander-v3", "--num-envs", "64"]
        run = subprocess.Popen([*command, "--sync", "aps", "--target", "inf"], cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            while not records.live():
                time.sleep(0.1)
            client = Client(find(None))
            time.sleep(options.seconds * 0.6)
            sample = client.sample()
            assert sample is not None and sample.workers[-1].pid is not None
            os.kill(sample.workers[-1].pid, signal.SIGKILL)
            time.sleep(options.seconds * 0.4)
            served = start(client)
            with chromium.browser(Path(home) / "profile") as driver:
                for name, (width, scheme) in SHOTS.items():
                    chromium.show_as(driver, width=width, scheme=scheme)
                    driver.get(served.url)
                    time.sleep(5.0)
                    chromium.screenshot(driver, options.out / f"{name}.png")
                print(f"{cost():.4f} CPU seconds per second to serve one viewer")
            served.close()
            client.close()
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()


if __name__ == "__main__":
    main()
