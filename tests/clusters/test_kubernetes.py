"""In real pods: what the cluster does to nodes, and what is left when a run is over."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import clusterenv as ce
import real
from closing import close_while
from clusterenv.backends import kubernetes, kubernetes_api
from clusterenv.backends.kubernetes import pod_manifest, run_manifest, secret_manifest
from clusterenv.cli import main
from namespace_cluster import pods
from stepping import joined, step_until

ID = "CartPole-v1"
FAST = (0.2, 1.5, 4.0)
RECOVERY = ce.Recovery(backoff_s=(0.05, 0.1))
RBAC = Path(__file__).parents[2] / "deploy" / "rbac.yaml"
in_pods = pytest.mark.kubernetes


def make(n=4, nodes=2, **kwargs):
    backend = pods(real.running["kubernetes"], nodes, **{"heartbeat_s": FAST, "run_as_user": 1000, **kwargs})
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
    assert run_manifest("abc", 60.0)["metadata"]["name"] == owner["name"]


def test_pods_know_what_they_are_granted_to_leave():
    for options, grace_s in (({}, 30), ({"grace_s": 90}, 90), ({"grace_s": 90, "pod_overrides": GRACE}, 5)):
        pod = pod_manifest(ce.Kubernetes(nodes=1, image="x", **options), "abc", 0, "name", [], {})
        command = pod["spec"]["containers"][0]["command"]
        assert command[command.index("--grace-s") + 1] == str(grace_s)
        assert pod["spec"]["terminationGracePeriodSeconds"] == grace_s


GRACE = {"terminationGracePeriodSeconds": 5}


def violations(pod):
    """What the "restricted" Pod Security Standard (v1.25) finds wrong with a pod."""
    spec, found = pod["spec"], []
    of_pod = spec.get("securityContext", {})
    for container in spec["containers"]:
        own = container.get("securityContext", {})
        for name, allowed in (("runAsNonRoot", [True]), ("seccompProfile", [{"type": "RuntimeDefault"}])):
            if own.get(name, of_pod.get(name)) not in allowed:
                found.append(name)
        if own.get("runAsUser", of_pod.get("runAsUser")) == 0:
            found.append("runAsUser")
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            found.append("allowPrivilegeEscalation")
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            found.append("capabilities")
        found += [f"hostPort {port}" for port in container.get("ports", []) if port.get("hostPort")]
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    kinds = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    found += [f"volume {volume['name']}" for volume in spec["volumes"] if not volume.keys() & kinds]
    return found


@pytest.mark.parametrize(("user", "expected"), [(1000, []), (4711, []), (None, []), (0, ["runAsNonRoot", "runAsUser"])])
def test_pods_are_what_restricted_namespaces_take(user, expected):
    backend = ce.Kubernetes(nodes=1, image="x", run_as_user=user)
    pod = pod_manifest(backend, "abc", 0, "name", [], {})
    assert violations(pod) == expected and pod["spec"]["securityContext"].get("runAsUser") == user


def test_bad_user():
    with pytest.raises(ce.SpecError, match=r"run_as_user=-1\): a user id, 0 or more"):
        ce.Kubernetes(nodes=1, image="x", run_as_user=-1)


def test_the_head_has_the_rights_that_it_uses_and_no_others():
    """In particular none to read Secrets."""
    role = next(item for item in yaml.safe_load_all(RBAC.read_text()) if item["kind"] == "Role")
    given = {(verb, what) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]}
    used = set()
    for module in (kubernetes, kubernetes_api):
        source = Path(module.__file__).read_text()
        for call, what in re.findall(r'"([a-z_]+)_namespaced_([a-z_]+)"', source):
            verb = {"read": "get", "delete_collection": "deletecollection"}.get(call, call)
            used.add((verb, "pods/log" if what == "pod_log" else what.replace("_", "") + "s"))
    assert given == used
    assert {verb for verb, what in given if what == "secrets"} == {"create"}


def test_script_on_the_command_line(capsys):
    assert main(["script", "kubernetes", "image=me/clusterenv", "cpu=2"]) == 0
    kinds = [item["kind"] for item in json.loads(capsys.readouterr().out)["items"]]
    assert kinds == ["ConfigMap", "Secret", "Pod"]
    assert main(["script", "kubernetes"]) == 2 and "image" in capsys.readouterr().err


def test_no_kubeconfig(tmp_path):
    with pytest.raises(ce.StartError, match="no usable kubeconfig"):
        ce.ClusterEnv(ID, 2, backend=ce.Kubernetes(nodes=1, image="x", kubeconfig=str(tmp_path / "none")))


class Server(http.server.BaseHTTPRequestHandler):
    """Takes one token, and has no pods."""

    token = "old"

    def do_GET(self):
        is_known = self.headers["Authorization"] == f"Bearer {self.token}"
        answer = {"kind": "PodList", "items": []} if is_known else {"kind": "Status", "message": "Unauthorized"}
        body = json.dumps(answer).encode()
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_credentials_that_have_expired(tmp_path, monkeypatch):
    """They are told as such, and read again: renewing them in the kubeconfig is enough."""
    path = tmp_path / "kubeconfig"

    def renew(token):
        path.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            renew("old")
            api = kubernetes_api.Api(str(path))
            assert api.ask("list_namespaced_pod", "default").items == []
            monkeypatch.setattr(Server, "token", "new")
            with pytest.raises(ce.StartError, match=r"Kubernetes says: Unauthorized \(401: .* renew them"):
                api.ask("list_namespaced_pod", "default")
            renew("new")
            assert api.ask("list_namespaced_pod", "default").items == []
        finally:
            server.shutdown()
            thread.join()


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


@pytest.mark.guarantee(15, 17)
@in_pods
@pytest.mark.smoke
def test_a_deleted_pod_is_replaced_and_nothing_is_left(record_property):
    with make() as envs:
        envs.reset(seed=1)
        assert len(objects()) == 5, "two pods, two secrets, the run"
        victim = next(name for name in objects() if name.startswith("pod/") and "-0-1" in name)
        kubectl("delete", "--wait=false", victim)
        _, lost = step_until(envs, lambda: joined(envs) == 3 and not envs.stats()["missing_nodes"])
        assert len(lost) == len(set(lost)) and set(lost) <= {0, 1}
        record_property("lost_steps", len(lost))
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
    backend = pods(real.running["kubernetes"], 1, heartbeat_s=FAST, memory="400Mi")
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
    kubectl("apply", "-f", str(RBAC))
    kubectl("create", "configmap", "authority", f"--from-literal=ca.crt={cluster.authority}")
    backend = pods(cluster, 2, heartbeat_s=FAST, kubeconfig=None, bind=None, folder=str(tmp_path))
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
        its_rights = "--as=system:serviceaccount:default:clusterenv-head"
        with pytest.raises(RuntimeError, match="no"):
            kubectl("auth", "can-i", "get", "secrets", its_rights)
        assert phase == "Succeeded" and "valid rows: 128" in kubectl("logs", "head"), kubectl("logs", "head")
        await_nothing_left()
    finally:
        kubectl("delete", "pod/head", "configmap/authority", "--force", "--grace-period=0")


@pytest.mark.guarantee(13)
@in_pods
@pytest.mark.parametrize("where", ["here", "in a pod"])
def test_nothing_runs_after_its_head_was_killed_and_gc_removes_the_rest(
    tmp_path, capsys, monkeypatch, where, record_property
):
    """By the note in the run's folder; where that went with the head's pod, by the run object in the namespace."""
    folder = tmp_path / "keys"
    backend = pods(real.running["kubernetes"], 2, heartbeat_s=FAST, folder=str(folder))
    settings = {item.name: getattr(backend, item.name) for item in dataclasses.fields(backend)}
    head = subprocess.Popen([sys.executable, "-c", HEAD.format(settings=settings)], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None and head.stdout.readline() == "running\n"
    monkeypatch.setenv("KUBECONFIG", str(backend.kubeconfig))
    gc = ["gc", "--folder", str(folder)] + ["--kubernetes"] * (where != "here")
    assert main(gc) == 0 and len(objects()) == 5, "it is running"
    os.kill(head.pid, signal.SIGKILL)
    head.wait()
    head.stdout.close()
    begin = time.monotonic()
    while "Running" in kubectl("get", "pods", "--no-headers"):
        assert time.monotonic() < begin + FAST[2] + 20, kubectl("get", "pods")
        time.sleep(0.5)
    record_property("gone_s", time.monotonic() - begin)
    assert len(objects()) == 5, "finished pods, secrets"
    capsys.readouterr()
    if where != "here":
        shutil.rmtree(folder)
        assert main(gc) == 0 and "its head may be running (last seen" in capsys.readouterr().out
        run = next(name for name in objects() if name.startswith("configmap/"))
        kubectl("annotate", "--overwrite", run, "clusterenv/seen=2026-01-01T00:00:00+00:00")
    assert main(gc) == 0
    told = capsys.readouterr().out
    assert ("is deleted" if where == "here" else "deleting, its head has ended") in told
    await_nothing_left()
    assert not list(folder.glob("clusterenv-*"))


@pytest.mark.guarantee(16)
@in_pods
def test_close_while_the_api_server_hangs(tmp_path, record_property):
    cluster = real.running["kubernetes"]
    backend = pods(cluster, 2, heartbeat_s=FAST, folder=str(tmp_path))
    closed = close_while(lambda: cluster.stopped("apiserver"), backend, 2)
    assert closed.seconds < 10 and closed.exit_seconds < 5, closed
    record_property("closed_s", closed.seconds)
    (left,) = tmp_path.glob("clusterenv-*")
    assert f"2 pods of run {left.name} in namespace default" in closed.told, closed.told
    assert f"clusterenv gc --folder {tmp_path}" in closed.told
    assert {path.read_text() for path in left.glob("*.key")} == {"closed\n"} and len(objects()) == 5
    assert main(["gc", "--folder", str(tmp_path)]) == 0 and not left.exists()
    await_nothing_left()


@in_pods
def test_rights_that_are_taken_away_are_told(tmp_path):
    """The rights of deploy/rbac.yaml are enough for a run; without them, and with them again, an event says so."""
    guest = str(real.running["kubernetes"].user("guest"))
    kubectl("apply", "-f", str(RBAC))
    give = ["create", "rolebinding", "guest", "--role=clusterenv-head", "--user=guest"]
    kubectl(*give)
    try:
        with make(kubeconfig=guest) as envs:
            envs.reset(seed=1)

            def told(kind):
                return [event.reason for event in envs.events() if event.kind == kind]

            kubectl("delete", "rolebinding", "guest")
            step_until(envs, lambda: told("scheduler_lost"))
            assert "Kubernetes says: pods is forbidden" in told("scheduler_lost")[0]
            kubectl(*give)
            step_until(envs, lambda: told("scheduler_back"))
        await_nothing_left()
    finally:
        kubectl("delete", "rolebinding", "guest")


def tell_rights():
    import gymnasium

    class Teller(gymnasium.Wrapper):
        def rights(self):
            import os
            from pathlib import Path

            lines = Path("/proc/self/status").read_text().splitlines()
            wanted = ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
            return os.getuid(), {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(wanted)}

    return Teller(gymnasium.make(ID))


@in_pods
def test_pods_run_without_privileges():
    backend = pods(real.running["kubernetes"], 1, heartbeat_s=FAST, run_as_user=1000)
    with ce.ClusterEnv(tell_rights, 1, backend=backend) as envs:
        envs.reset(seed=1)
        ((user, rights),) = envs.call("rights")
    assert user == 1000 and int(rights["CapEff"], 16) == int(rights["CapBnd"], 16) == 0
    assert rights["NoNewPrivs"] == "1" and rights["Seccomp"] == "2", "2 is a filter"
    await_nothing_left()
