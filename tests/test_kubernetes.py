"""In real pods: what the cluster does to nodes, and what is left when a run is over."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import clusterenv as ce
import real
from clusterenv.backends.kubernetes import pod_manifest, run_manifest, secret_manifest
from clusterenv.cli import main
from clusters import pods
from stepping import joined, step_until

ID = "CartPole-v1"
FAST = (0.2, 1.5, 4.0)
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))
in_pods = pytest.mark.kubernetes


def make(n=4, nodes=2, **kwargs):
    backend = pods(real.running["kubernetes"], nodes, **{"heartbeat": FAST, **kwargs})
    return ce.ClusterEnv(ID, n, backend=backend, recovery=RECOVERY)


def kubectl(*args):
    return real.running["kubernetes"].kubectl(*args)


def objects():
    """All that belongs to runs of ours."""
    return kubectl("get", "pod,secret,configmap", "-l", "app.kubernetes.io/name=clusterenv", "-o", "name").split()


def await_nothing_left(timeout_s=40.0):
    """What is deleted goes when the kubelet has seen to it."""
    deadline = time.monotonic() + timeout_s
    while left := objects():
        assert time.monotonic() < deadline, left
        time.sleep(0.3)


# -- manifests ----------------------------------------------------------------------------------------------------


def test_manifests():
    backend = ce.Kubernetes(
        nodes=2,
        image="registry/clusterenv:1",
        workers_per_node=8,
        memory="4Gi",
        node_selector={"pool": "cpu"},
        tolerations=[{"key": "spot", "operator": "Exists"}],
        labels={"team": "rl", "clusterenv/run": "not-yours"},
        pod_overrides={
            "priorityClassName": "low",
            "volumes": [{"name": "data"}],
            "container": {"env": [{"name": "A"}]},
        },
    )
    owner = {"kind": "ConfigMap", "name": "clusterenv-abc", "uid": "u"}
    pod = pod_manifest(backend, "abc", 1, "clusterenv-abc-1-1", ["--no-pickle"], owner)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert container["command"][-2:] == ["--mounted", "--no-pickle"] and "secret" not in json.dumps(
        container["command"]
    )
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "4Gi"} == container["resources"]["requests"]
    assert [volume["name"] for volume in spec["volumes"]] == ["key", "data"] and container["env"] == [{"name": "A"}]
    assert spec["restartPolicy"] == "Never" and spec["automountServiceAccountToken"] is False
    assert spec["nodeSelector"] == {"pool": "cpu"} and spec["priorityClassName"] == "low"
    assert pod["metadata"]["labels"]["clusterenv/run"] == "abc" and pod["metadata"]["labels"]["team"] == "rl"
    assert pod["metadata"]["ownerReferences"] == [owner]
    secret = secret_manifest("abc", 1, "key", owner)
    assert secret["stringData"] == {"node.key": "key"} and secret["metadata"]["ownerReferences"] == [owner]
    assert spec["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]
    assert run_manifest("abc")["metadata"]["name"] == owner["name"]


def test_script_on_the_command_line(capsys):
    assert main(["script", "kubernetes", "image=me/clusterenv", "cpu=2"]) == 0
    kinds = [item["kind"] for item in json.loads(capsys.readouterr().out)["items"]]
    assert kinds == ["ConfigMap", "Secret", "Pod"]
    assert main(["script", "kubernetes"]) == 2 and "image" in capsys.readouterr().err


def test_no_kubeconfig(tmp_path):
    with pytest.raises(ce.StartError, match="no usable kubeconfig"):
        ce.ClusterEnv(ID, 2, backend=ce.Kubernetes(nodes=1, image="x", kubeconfig=str(tmp_path / "none")))


# -- what the cluster answers -------------------------------------------------------------------------------------


@in_pods
def test_an_image_that_is_not_there():
    with pytest.raises(ce.StartError, match=r"pod clusterenv-\w+-\d-1 is waiting: ErrImageNeverPull"):
        make(image="no-such-image:1")
    await_nothing_left()


@in_pods
def test_no_rights_in_the_namespace():
    with pytest.raises(ce.StartError, match=r"Kubernetes says: .* is forbidden"):
        make(kubeconfig=str(real.running["kubernetes"].user("guest")))
    await_nothing_left()


@in_pods
def test_a_quota():
    kubectl("create", "quota", "small", "--hard=pods=1")
    try:
        deadline = time.monotonic() + 20
        while "pods" not in kubectl("get", "quota", "small", "-o", "jsonpath={.status.used}"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with pytest.raises(ce.StartError, match=r"Kubernetes says: .*exceeded quota"):
            make()
    finally:
        kubectl("delete", "quota", "small")
    await_nothing_left()


@in_pods
def test_pods_that_fit_nowhere():
    with pytest.raises(ce.StartError, match=r"waiting for node 0: Pending \(Unschedulable: .*Insufficient cpu"):
        make(cpu=64, start_timeout_s=6)
    await_nothing_left()


# -- faults -------------------------------------------------------------------------------------------------------


@in_pods
@pytest.mark.smoke
def test_a_deleted_pod_is_replaced_and_nothing_is_left():
    with make() as envs:
        envs.reset(seed=1)
        assert len(objects()) == 5, "two pods, two secrets, the run"
        victim = next(name for name in objects() if name.startswith("pod/") and "-0-1" in name)
        kubectl("delete", "--wait=false", victim)
        _, lost = step_until(envs, lambda: joined(envs) == 3 and not envs.stats()["missing_nodes"])
        assert len(lost) == len(set(lost)) and set(lost) <= {0, 1}
        assert "preempted" in next(event.reason for event in envs.events() if event.kind == "node_lost")
        assert envs.collector(ce.RandomPolicy(), seed=1).rollout(8).valid.all()
    await_nothing_left()


def eat_memory():
    import gymnasium

    class Hungry(gymnasium.Wrapper):
        def step(self, action):
            self.kept = [*getattr(self, "kept", []), bytearray(32 << 20)]
            return super().step(action)

    return Hungry(gymnasium.make(ID))


@in_pods
def test_a_pod_without_memory():
    """The kernel kills a worker, or the whole container: it costs episodes, and the reason is told."""
    backend = pods(real.running["kubernetes"], 1, heartbeat=FAST, memory="400Mi")
    recovery = ce.Recovery(backoff_s=(0.05, 0.1), max_restarts=1000)
    with ce.ClusterEnv(eat_memory, 1, backend=backend, recovery=recovery) as envs:
        envs.reset(seed=1)
        deadline, declared = time.monotonic() + 90, False
        while not declared:
            assert time.monotonic() < deadline, envs.events()
            infos = envs.step(np.zeros(1, np.int64))[4]
            declared = "transition_valid" in infos
        told = " ".join(event.reason for event in envs.events() if event.kind in ("worker_lost", "node_lost"))
        assert "SIGKILL" in told or "OOMKilled" in told or "connection ended" in told, told
    await_nothing_left()


@in_pods
def test_the_run_object_deleted_by_hand():
    with make() as envs:
        envs.reset(seed=1)
        run = next(name for name in objects() if name.startswith("configmap/"))
        kubectl("delete", "--wait=false", run)
        step_until(envs, lambda: joined(envs) == 4 and not envs.stats()["missing_nodes"], 100)
        assert len(objects()) == 5
    await_nothing_left()


HEAD = """
import time, numpy as np, clusterenv as ce
backend = ce.Kubernetes(**{settings!r})
envs = ce.ClusterEnv("CartPole-v1", 2, backend=backend)
envs.reset(seed=1)
print("running", flush=True)
time.sleep(100)
"""


INSIDE = """
import numpy as np, clusterenv as ce
backend = ce.Kubernetes(**{settings!r})
with ce.ClusterEnv("CartPole-v1", 4, backend=backend) as envs:
    policy = ce.NumpyPolicy(lambda w, obs: obs @ w["w"], {{"w": np.ones((4, 2), np.float32)}})
    batch = envs.collector(policy, seed=1).rollout(32)
    print("valid rows:", int(batch.valid.sum()), flush=True)
"""


@in_pods
def test_the_head_in_a_pod(tmp_path):
    """With nothing but its service account and the rights of deploy/rbac.yaml; its address is the pod's own."""
    cluster = real.running["kubernetes"]
    kubectl("apply", "-f", str(Path(__file__).parent.parent / "deploy" / "rbac.yaml"))
    kubectl("create", "configmap", "authority", f"--from-literal=ca.crt={cluster.authority}")
    backend = pods(cluster, 2, heartbeat=FAST, kubeconfig=None, bind=None, folder=str(tmp_path))
    settings = {item.name: getattr(backend, item.name) for item in dataclasses.fields(backend)}
    # What the admission plugin adds where it is on, as it is not here.
    account = [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": "authority", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    where = "/var/run/secrets/kubernetes.io/serviceaccount"
    api = {"KUBERNETES_SERVICE_HOST": cluster.host_address, "KUBERNETES_SERVICE_PORT": str(cluster.api_port)}
    container = {
        "name": "head",
        "image": cluster.image,
        "imagePullPolicy": "Never",
        "command": [sys.executable, "-c", INSIDE.format(settings=settings)],
        "env": [{"name": name, "value": value} for name, value in api.items()],
        "volumeMounts": [*cluster.volume_mounts, {"name": "account", "mountPath": where}],
    }
    spec = {
        "serviceAccountName": "clusterenv-head",
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [*cluster.volumes, {"name": "account", "projected": {"sources": account}}],
    }
    path = tmp_path / "head.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "head"}, "spec": spec}))
    kubectl("apply", "-f", str(path))
    try:
        deadline = time.monotonic() + 80
        while (phase := kubectl("get", "pod", "head", "-o", "jsonpath={.status.phase}")) in ("Pending", "Running"):
            assert time.monotonic() < deadline, kubectl("logs", "head")
            time.sleep(0.5)
        assert phase == "Succeeded" and "valid rows: 128" in kubectl("logs", "head"), kubectl("logs", "head")
        await_nothing_left()
    finally:
        kubectl("delete", "pod/head", "configmap/authority", "--force", "--grace-period=0")


@in_pods
def test_nothing_runs_after_its_head_was_killed_and_gc_removes_the_rest(tmp_path, capsys):
    folder = tmp_path / "keys"
    backend = pods(real.running["kubernetes"], 2, heartbeat=FAST, folder=str(folder))
    settings = {item.name: getattr(backend, item.name) for item in dataclasses.fields(backend)}
    head = subprocess.Popen([sys.executable, "-c", HEAD.format(settings=settings)], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None and head.stdout.readline() == "running\n"
    os.kill(head.pid, signal.SIGKILL)
    head.wait()
    head.stdout.close()
    deadline = time.monotonic() + FAST[2] + 20
    while "Running" in kubectl("get", "pods", "--no-headers"):
        assert time.monotonic() < deadline, kubectl("get", "pods")
        time.sleep(0.5)
    assert len(objects()) == 5, "finished pods, secrets"
    main(["gc", "--folder", str(folder)])
    assert "deleting run clusterenv-" in capsys.readouterr().out
    await_nothing_left()
    assert not list(folder.glob("clusterenv-*"))
