"""A real run on two nodes in a real browser: a worker is killed, a node is stopped, and the page shows both."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time

import pytest
import torch
from selenium.webdriver.common.by import By

import chromium
import clusterenv as ce
from clusterenv.monitor.client import Client, find

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


def test_a_killed_worker_and_a_stopped_node_appear_on_the_page_and_recover(driver, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CLUSTERENV_HOME", str(tmp_path / "home"))
    module = torch.nn.Linear(4, 2)
    agent = ce.TorchPolicy(module, dist="categorical")
    backend = ce.Loopback(nodes=2, heartbeat_s=(0.2, 2.0, 60.0), move_after_s=None)
    recovery = ce.Recovery(max_restarts=100, backoff_s=(0.0, 0.1))
    with ce.ClusterEnv("CartPole-v1", 8, backend=backend, recovery=recovery, name="seen", dashboard=True) as envs:
        (url,) = re.findall(r"the page of this run: (\S+)", capsys.readouterr().err)
        collector = envs.collector(agent, seed=1, sync=ce.APS(threshold=0.05))

        def collect_until(condition, seconds=40):
            deadline = time.monotonic() + seconds
            while not condition():
                assert time.monotonic() < deadline, driver.find_element(By.TAG_NAME, "body").text
                with torch.no_grad():
                    module.weight.add_(0.002 * torch.randn_like(module.weight))
                collector.rollout(16)

        def text(selector):
            return driver.find_element(By.CSS_SELECTOR, selector).text

        chromium.show_as(driver, width=1280, scheme="light")
        driver.get(url)
        collect_until(lambda: text("#nodes tbody").count("joined") == 2)
        assert text("h1") == "seen" and "token" not in driver.current_url
        collect_until(lambda: driver.find_elements(By.CSS_SELECTOR, "#sync-drift svg path"))
        collect_until(lambda: collector.stats()["pulls"] > 4)

        pid = envs.stats()["worker_pids"][1]
        os.kill(pid, signal.SIGKILL)
        collect_until(lambda: "worker_lost" in text("#events-list") and "SIGKILL" in text("#events-list"))
        collect_until(lambda: envs.stats()["worker_pids"][1] not in (None, pid))

        with contextlib.closing(Client(find("seen"))) as client:
            agent_pid = client.sample().nodes[0].pid
        os.kill(agent_pid, signal.SIGSTOP)  # lost after 2 s; the rollout waits for it
        threading.Timer(5.0, os.kill, (agent_pid, signal.SIGCONT)).start()
        collect_until(lambda: "node_lost" in text("#events-list"))
        collect_until(lambda: text("#nodes tbody").count("joined") == 2)
        assert "node_back" in text("#events-list") or "node_joined" in text("#events-list")
    deadline = time.monotonic() + 20
    while text("#run-state") not in ("over", "disconnected", "connection lost"):
        assert time.monotonic() < deadline, text("#run-state")
        time.sleep(0.1)
    assert "worker_lost" in text("#events-list"), "the data stays"
