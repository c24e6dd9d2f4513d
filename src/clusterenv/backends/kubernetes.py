"""`Kubernetes`: one bare pod per node, each with its own Secret, all owned by one small run object.

Deleting that object (a ConfigMap) deletes everything. A Job would end all pods when one succeeds, count their failures
together, and scale down whichever it likes. Manifests are made by pure functions; the official client is imported when
a run begins.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterenv.backends.keeper import start_first
from clusterenv.backends.remote import Remote
from clusterenv.errors import SpecError, StartError
from clusterenv.events import emit

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clusterenv.backends.network import Plan
    from clusterenv.events import EventLog
    from clusterenv.pool import Pool
    from clusterenv.recovery import Recovery
    from clusterenv.spec import Blueprint

__all__ = ["Kubernetes", "delete_run", "pod_manifest", "run_manifest", "secret_manifest"]

_KEY = "/var/run/clusterenv/node.key"
_ANSWER_S = 10.0  # for one answer of the API, once the run has begun
_GONE_S = 5.0
_HOPELESS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
}
"""A container that waits for such a reason would wait for ever."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kubernetes(Remote):
    """Nodes as pods.

    Args:
        nodes: how many pods.
        image: with the same Python minor, Gymnasium and clusterenv as here (deploy/Dockerfile makes one).
        namespace: None: the one of the kubeconfig's context, or the head's own pod.
        cpu, memory: of a pod, as Kubernetes writes them; `cpu` None: one core per worker. Requests and limits.
        node_selector, tolerations, service_account, labels: of the pods.
        pod_overrides: merged into the pod's spec: {"priorityClassName": "low"}. Lists are appended to.
        python: the interpreter in the image.
        kubeconfig, context: None: as kubectl finds them; within a pod, its service account.
        grace_s: what a pod gets to finish its step when it is deleted.
        others: as in `Remote`, which see.
    """

    nodes: int
    image: str
    namespace: str | None = None
    cpu: str | float | None = None
    memory: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    service_account: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    pod_overrides: Mapping[str, Any] = field(default_factory=dict)
    python: str = "python"
    kubeconfig: str | None = None
    context: str | None = None
    grace_s: int = 30

    def __post_init__(self) -> None:
        self._check(self.nodes)
        if not self.image:
            raise SpecError("Kubernetes(image=''): name an image that has clusterenv in it")

    def start(self, blueprint: Blueprint, mode: AutoresetMode | None, recovery: Recovery, events: EventLog) -> Pool:
        api, namespace = connect(self.kubeconfig, self.context)
        namespace = self.namespace or namespace
        try:
            return self.start_with(
                self.nodes, lambda plan: _Pods(self, plan, api, namespace), blueprint, mode, recovery, events
            )
        except BaseException:
            api.api_client.close()
            raise


# -- manifests ----------------------------------------------------------------------------------------------------


def run_manifest(run: str) -> Manifest:
    """The object that owns everything of a run."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"clusterenv-{run}", "labels": _labels(run)}}


def secret_manifest(run: str, node: int, key: str, owner: Manifest) -> Manifest:
    metadata = {"name": f"clusterenv-{run}-{node}", "labels": _labels(run), "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"node.key": key}}


def pod_manifest(
    backend: Kubernetes, run: str, node: int, name: str, options: Sequence[str], owner: Manifest
) -> Manifest:
    cores = backend.workers_per_node if backend.cpu is None else backend.cpu
    resources = {"cpu": str(cores), **({} if backend.memory is None else {"memory": backend.memory})}
    container = {
        "name": "node",
        "image": backend.image,
        "command": [backend.python, "-m", "clusterenv", "node", "--join", _KEY, "--mounted", *options],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "key", "mountPath": _KEY, "subPath": "node.key", "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": backend.grace_s,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "key", "secret": {"secretName": f"clusterenv-{run}-{node}", "defaultMode": 0o444}}],
    }
    for name_, value in (
        ("nodeSelector", dict(backend.node_selector)),
        ("tolerations", [dict(toleration) for toleration in backend.tolerations]),
        ("serviceAccountName", backend.service_account),
    ):
        if value:
            spec[name_] = value
    overrides = dict(backend.pod_overrides)
    for key, value in overrides.pop("container", {}).items():
        container[key] = _merged(container.get(key), value)
    for key, value in overrides.items():
        spec[key] = _merged(spec.get(key), value)
    labels = {**backend.labels, **_labels(run), "clusterenv/node": str(node)}
    metadata = {"name": name, "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _labels(run: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "clusterenv", "clusterenv/run": run}


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, list) and isinstance(new, (list, tuple)):
        return [*old, *new]
    if isinstance(old, dict) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


# -- pods ---------------------------------------------------------------------------------------------------------


def connect(kubeconfig: str | None, context: str | None) -> tuple[Any, str]:
    """The API, and the namespace that one is in."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise StartError('Kubernetes(...) needs its client: pip install "clusterenv[kubernetes]"') from None
    inside = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    settings = client.Configuration()
    try:
        if kubeconfig is None and not os.environ.get("KUBECONFIG") and inside.exists():
            config.load_incluster_config(client_configuration=settings)
            namespace = inside.read_text().strip()
        else:
            config.load_kube_config(kubeconfig, context, client_configuration=settings, persist_config=False)
            contexts, active = config.list_kube_config_contexts(kubeconfig)
            chosen = next((item for item in contexts if item["name"] == context), active)
            namespace = chosen["context"].get("namespace", "default")
    except (config.ConfigException, OSError, TypeError) as error:
        raise StartError(f"Kubernetes: there is no usable kubeconfig: {error}") from None
    settings.retries = 1
    return client.CoreV1Api(client.ApiClient(settings)), namespace


class _Pods:
    """`Jobs` of Kubernetes."""

    def __init__(self, backend: Kubernetes, plan: Plan, api: Any, namespace: str) -> None:
        self._backend, self._plan, self._api, self._namespace = backend, plan, api, namespace
        note = {"namespace": namespace, "kubeconfig": backend.kubeconfig, "context": backend.context, "run": plan.run}
        (plan.folder / "kubernetes.json").write_text(json.dumps(note))
        self._pod = [""] * len(plan.files)
        self._tries = [0] * len(plan.files)
        self._seen: dict[str, Any] = {}  # pod → as the API last described it; None: it is gone
        start_first(self, plan.nodes)
        emit(logging.INFO, f"{plan.nodes} pods of run clusterenv-{plan.run} in namespace {namespace}")

    def look(self) -> dict[int, str]:
        selector = f"clusterenv/run={self._plan.run}"
        found = _ask(
            self._api.list_namespaced_pod, self._namespace, label_selector=selector, _request_timeout=_ANSWER_S
        )
        self._seen = {**dict.fromkeys(self._seen), **{pod.metadata.name: pod for pod in found.items}}
        over = {}
        for node, name in enumerate(self._pod):
            if name in self._seen:
                pod = self._seen[name]
                text, is_over = ("deleted", True) if pod is None else _describe(pod)
                if is_over:
                    over[node] = f"ended: pod {name} is {text}"
        return over

    def has_job(self, node: int) -> bool:
        return bool(self._pod[node])

    def start(self, node: int) -> None:
        self._delete(node, 0)
        owner, run = self._owner(), self._plan.run
        secret = secret_manifest(run, node, self._plan.files[node].read_text(), owner)
        _ask(self._api.create_namespaced_secret, self._namespace, secret, none_if=409)  # there from the pod before
        self._tries[node] += 1
        name = f"clusterenv-{run}-{node}-{self._tries[node]}"
        pod = pod_manifest(self._backend, run, node, name, self._plan.options, owner)
        _ask(self._api.create_namespaced_pod, self._namespace, pod)
        self._pod[node] = name

    def _owner(self) -> Manifest:
        """The run object; made anew where somebody has deleted it, and with it everything that it owned."""
        name, where = f"clusterenv-{self._plan.run}", self._namespace
        found = _ask(self._api.read_namespaced_config_map, name, where, none_if=404)
        if found is None:
            found = _ask(self._api.create_namespaced_config_map, where, run_manifest(self._plan.run))
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": found.metadata.uid}

    def drop(self, node: int) -> None:
        self._delete(node, 5)
        self._pod[node] = ""

    def _delete(self, node: int, grace_s: int) -> None:
        if self._pod[node]:
            with contextlib.suppress(Exception):  # it is gone already, or will be with the run
                self._api.delete_namespaced_pod(
                    self._pod[node], self._namespace, grace_period_seconds=grace_s, _request_timeout=_ANSWER_S
                )

    def state(self, node: int) -> str:
        pod = self._seen.get(self._pod[node], "")
        return "" if pod == "" else "deleted" if pod is None else _describe(pod)[0]

    def log_tail(self, node: int) -> str:
        name = self._pod[node]
        try:
            tail = self._api.read_namespaced_pod_log(name, self._namespace, tail_lines=40, _request_timeout=5)
        except Exception as error:  # no container yet, or no pod any more
            tail = f"(no log: {_told(error)})"
        told = []
        with contextlib.suppress(Exception):  # events are a courtesy, which may need rights that the head lacks
            events = self._api.list_namespaced_event(
                self._namespace, field_selector=f"involvedObject.name={name}", _request_timeout=5
            )
            told = [f"{event.reason}: {event.message}" for event in events.items[-5:]]
        return "\n".join([f"pod {name}: {self.state(node)}", *told, tail or "(it has said nothing)"])

    def stop(self) -> None:
        try:
            delete_run(self._api, self._namespace, self._plan.run)
        finally:
            self._api.api_client.close()


def delete_run(api: Any, namespace: str, run: str) -> None:
    """Pods, Secrets, and the object that owns them. Waits until the pods are gone, but not for long."""
    selector = f"clusterenv/run={run}"

    def delete_pods(grace_s: int) -> bool:
        pods = api.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=_ANSWER_S).items
        for pod in pods:
            is_there = pod.status.phase == "Running" and not _describe(pod)[1]  # else nobody is to be told
            with contextlib.suppress(Exception):  # somebody was faster
                grace = grace_s if is_there else 0
                name = pod.metadata.name
                api.delete_namespaced_pod(name, namespace, grace_period_seconds=grace, _request_timeout=_ANSWER_S)
        return bool(pods)

    try:
        delete_pods(5)
        api.delete_collection_namespaced_secret(namespace, label_selector=selector, _request_timeout=_ANSWER_S)
        with contextlib.suppress(Exception):  # somebody was faster
            api.delete_namespaced_config_map(f"clusterenv-{run}", namespace, _request_timeout=_ANSWER_S)
        deadline = time.monotonic() + _GONE_S
        while delete_pods(5) and time.monotonic() < deadline:
            time.sleep(0.5)
        delete_pods(0)  # what a kubelet is slow to report: their processes have had their time
    except Exception as error:  # at the end of a run nothing better can be done than to say so
        emit(logging.WARNING, f"Kubernetes: run clusterenv-{run} could not be deleted: {_told(error)}")


def _describe(pod: Any) -> tuple[str, bool]:
    """What a pod does, and whether that is the end of it."""
    status = pod.status
    for container in status.container_statuses or []:
        waiting, ended = container.state.waiting, container.state.terminated
        if waiting is not None and waiting.reason in _HOPELESS:
            return f"waiting: {waiting.reason}: {waiting.message}", True
        if ended is not None:
            return f"over: {ended.reason} (exit code {ended.exit_code})", True
    if status.phase in ("Failed", "Succeeded"):
        return f"{status.phase} {status.reason or ''} {status.message or ''}".strip(), True
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{status.phase} ({condition.reason}: {condition.message})", False
    return str(status.phase), False


def _ask(call: Any, *args: Any, none_if: int = 0, **options: Any) -> Any:
    """The answer; None where it is this HTTP status, and a StartError that quotes any other."""
    try:
        return call(*args, **{"_request_timeout": 30, **options})
    except Exception as error:  # the client raises its own, and urllib3's
        if getattr(error, "status", None) == none_if:
            return None
        raise _told(error) from None


def _told(error: Exception) -> StartError:
    """What the API server said, in one line."""
    body = getattr(error, "body", None)
    with contextlib.suppress(TypeError, ValueError, KeyError):
        return StartError(f"Kubernetes says: {json.loads(body)['message']}")  # type: ignore[arg-type]
    return StartError(f"Kubernetes cannot be reached: {str(getattr(error, 'reason', None) or error)[:300]}")
