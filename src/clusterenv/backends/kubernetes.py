"""`Kubernetes`: run each node as a bare pod with its own Secret, all owned by one small run object.

Deleting that object (a ConfigMap) deletes everything. A Kubernetes Job does not fit: it would end all pods when one
succeeds, count their failures together, and choose which pods to remove. Pods meet the "restricted" Pod Security
Standard unless options say otherwise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from clusterenv.backends.contract import Hopeless, Plan, agent_command
from clusterenv.backends.kubernetes_api import LEASE, SEEN, Api, collect, delete_run, labels, now, selector
from clusterenv.backends.remote import Remote
from clusterenv.errors import SpecError, StartError
from clusterenv.events import emit
from clusterenv.system.exits import NEVER

_KEY = Path("/var/run/clusterenv/node.key")
_BEAT_S = 30.0  # how often the head marks the run object as alive

_HOPELESS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
}
"""Reasons for which a container would wait forever."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kubernetes(Remote):
    """Run nodes as Kubernetes pods.

    Args:
        nodes: number of pods.
        image: must have the same Python minor version, Gymnasium and clusterenv as here (deploy/Dockerfile builds one).
        namespace: None: that of the kubeconfig's context, or of the head's own pod.
        cpu, memory: requests and limits of a pod, in Kubernetes notation; `cpu` None: one core per worker.
        node_selector, tolerations, service_account, labels: set on the pods.
        pod_overrides: merged into the pod's spec: {"priorityClassName": "low"}. Lists are appended to.
        run_as_user: the user id in the pods. None: that of the image, or one that the platform chooses; if that is
            root, the cluster refuses the pod. 0: root, which namespaces with the "restricted" standard refuse.
        python: the interpreter in the image.
        kubeconfig, context: None: as kubectl finds them; within a pod, its service account.
        grace_s: seconds that a deleted or evicted pod gets to finish its step and hand over its results.
        others: as in `Remote`.
    """

    image: str
    namespace: str | None = None
    cpu: str | float | None = None
    memory: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    service_account: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    pod_overrides: Mapping[str, Any] = field(default_factory=dict)
    run_as_user: int | None = 1000
    python: str = "python"
    kubeconfig: str | None = None
    context: str | None = None
    grace_s: int = 30
    name: ClassVar[str] = "kubernetes"
    collect_garbage = staticmethod(collect)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.image:
            raise SpecError("Kubernetes(image=''): name an image that has clusterenv in it")
        if self.run_as_user is not None and self.run_as_user < 0:
            raise SpecError(f"Kubernetes(run_as_user={self.run_as_user}): a user id, 0 or more, or None")

    def launch(self, plan: Plan) -> _Pods:
        api = Api(self.kubeconfig, self.context)
        return _Pods(self, plan, api, self.namespace or api.namespace)

    def script(self, plan: Plan) -> str:
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": f"clusterenv-{plan.run}", "uid": "..."}
        pod = pod_manifest(self, plan.run, 0, f"clusterenv-{plan.run}-0-1", plan.options, owner)
        items = [run_manifest(plan.run, plan.lease_s), secret_manifest(plan.run, 0, "...", owner), pod]
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)


# -- manifests ----------------------------------------------------------------------------------------------------


def run_manifest(run: str, lease_s: float) -> Manifest:
    """Return the manifest of the object that owns everything in a run, and records when its head was last alive."""
    annotations = {SEEN: now(), LEASE: f"{lease_s:g}"}
    metadata = {"name": f"clusterenv-{run}", "labels": labels(run), "annotations": annotations}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def secret_manifest(run: str, node: int, key: str, owner: Manifest) -> Manifest:
    metadata = {"name": f"clusterenv-{run}-{node}", "labels": labels(run), "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"node.key": key}}


def pod_manifest(
    backend: Kubernetes, run: str, node: int, name: str, options: Sequence[str], owner: Manifest
) -> Manifest:
    cores = backend.workers_per_node if backend.cpu is None else backend.cpu
    resources = {"cpu": str(cores), **({} if backend.memory is None else {"memory": backend.memory})}
    grace_s = backend.pod_overrides.get("terminationGracePeriodSeconds", backend.grace_s)
    container = {
        "name": "node",
        "image": backend.image,
        "command": agent_command(_KEY, ["--grace-s", str(grace_s), "--mounted", *options], backend.python),
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "key", "mountPath": str(_KEY), "subPath": "node.key", "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": backend.grace_s,
        "automountServiceAccountToken": False,
        "securityContext": _security(backend.run_as_user),
        "containers": [container],
        "volumes": [{"name": "key", "secret": {"secretName": f"clusterenv-{run}-{node}", "defaultMode": 0o444}}],
    }
    if backend.node_selector:
        spec["nodeSelector"] = dict(backend.node_selector)
    if backend.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in backend.tolerations]
    if backend.service_account:
        spec["serviceAccountName"] = backend.service_account
    overrides = dict(backend.pod_overrides)
    for key, value in overrides.pop("container", {}).items():
        container[key] = _merged(container.get(key), value)
    for key, value in overrides.items():
        spec[key] = _merged(spec.get(key), value)
    own = {**backend.labels, **labels(run), "clusterenv/node": str(node)}
    metadata = {"name": name, "labels": own, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _security(user: int | None) -> Manifest:
    """Return the pod's security context; it meets the "restricted" standard unless the user wants root."""
    who: Manifest = {} if user is None else {"runAsUser": user}
    return {**who, "runAsNonRoot": user != 0, "seccompProfile": {"type": "RuntimeDefault"}}


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, list) and isinstance(new, (list, tuple)):
        return [*old, *new]
    if isinstance(old, dict) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


# -- pods ---------------------------------------------------------------------------------------------------------


class _Pods:
    """Implement `Jobs` with pods."""

    def __init__(self, backend: Kubernetes, plan: Plan, api: Api, namespace: str) -> None:
        self._backend, self._plan, self._api, self._namespace = backend, plan, api, namespace
        self._pod = [""] * len(plan.files)
        self._tries = [0] * len(plan.files)
        self._seen: dict[str, Any] = {}  # pod name → its last description by the API; None: deleted
        self._beat_at, self._may_beat = time.monotonic() + _BEAT_S, True

    def note(self) -> dict[str, Any]:
        return {**self._api.note, "namespace": self._namespace, "run": self._plan.run}

    def look(self) -> dict[int, str]:
        found = self._api.ask("list_namespaced_pod", self._namespace, label_selector=selector(self._plan.run))
        self._seen = {**dict.fromkeys(self._seen), **{pod.metadata.name: pod for pod in found.items}}
        self._beat()
        over = {}
        for node, name in enumerate(self._pod):
            if name in self._seen:
                text, reason = _describe(self._seen[name])
                if reason is not None:
                    over[node] = reason(f"ended: pod {name} is {text}")
        return over

    def _beat(self) -> None:
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_S
            body = {"metadata": {"annotations": {SEEN: now()}}}
            name = f"clusterenv-{self._plan.run}"
            try:
                self._api.ask("patch_namespaced_config_map", name, self._namespace, body, none_if=404)
            except StartError as error:  # an older deploy/rbac.yaml lacks this right; the run works without it
                if self._may_beat:
                    emit(logging.WARNING, f"`clusterenv gc --kubernetes` may take this run for abandoned: {error}")
                self._may_beat = False

    def start(self, node: int) -> None:
        self._delete(node, 0)
        owner, run = self._owner(), self._plan.run
        secret = secret_manifest(run, node, self._plan.files[node].read_text(), owner)
        self._api.ask("create_namespaced_secret", self._namespace, secret, none_if=409)  # 409: it exists
        self._tries[node] += 1
        name = f"clusterenv-{run}-{node}-{self._tries[node]}"
        pod = pod_manifest(self._backend, run, node, name, self._plan.options, owner)
        self._api.ask("create_namespaced_pod", self._namespace, pod)
        self._pod[node] = name

    def _owner(self) -> Manifest:
        """Return a reference to the run object; create it again if it was deleted, along with all that it owned."""
        name, where = f"clusterenv-{self._plan.run}", self._namespace
        found = self._api.ask("read_namespaced_config_map", name, where, none_if=404)
        if found is None:
            manifest = run_manifest(self._plan.run, self._plan.lease_s)
            found = self._api.ask("create_namespaced_config_map", where, manifest)
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": found.metadata.uid}

    def drop(self, node: int) -> None:
        self._delete(node, 5)
        self._pod[node] = ""

    def _delete(self, node: int, grace_s: int) -> None:
        name, where = self._pod[node], self._namespace
        if name:
            self._api.ask("delete_namespaced_pod", name, where, grace_period_seconds=grace_s, none_if=404)

    def state(self, node: int) -> str:
        name = self._pod[node]
        return _describe(self._seen[name])[0] if name in self._seen else ""

    def log_tail(self, node: int) -> str:
        name = self._pod[node]
        try:
            tail = self._api.ask("read_namespaced_pod_log", name, self._namespace, tail_lines=40, timeout_s=5.0)
        except StartError as error:  # no container yet, or the pod is gone
            tail = f"(no log: {error})"
        lines = []
        with contextlib.suppress(StartError):  # the head may lack the right to read events
            its = f"involvedObject.name={name}"
            events = self._api.ask("list_namespaced_event", self._namespace, field_selector=its, timeout_s=5.0)
            lines = [f"{event.reason}: {event.message}" for event in events.items[-5:]]
        return "\n".join([f"pod {name}: {self.state(node)}", *lines, tail or "(no output)"])

    def describe(self) -> str:
        pods = sum(map(bool, self._pod))
        return f"{pods} pods of run clusterenv-{self._plan.run} in namespace {self._namespace}"

    def stop(self, deadline: float) -> None:
        try:
            delete_run(self._api, self._namespace, self._plan.run, deadline)
        finally:
            self._api.close()


def _describe(pod: Any) -> tuple[str, type[str] | None]:
    """Return the state of a pod in words and, if it has ended, the class of the reason: `Hopeless` or `str`."""
    if pod is None:
        return "deleted", str
    status = pod.status
    for container in status.container_statuses or []:
        waiting, ended = container.state.waiting, container.state.terminated
        if waiting is not None and waiting.reason in _HOPELESS:
            return f"waiting: {waiting.reason}: {waiting.message}", Hopeless
        if ended is not None:
            text = f"over: {ended.reason} (exit code {ended.exit_code})"
            return text, Hopeless if ended.exit_code == NEVER else str
    if status.phase in ("Failed", "Succeeded"):
        return f"{status.phase} {status.reason or ''} {status.message or ''}".strip(), str
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{status.phase} ({condition.reason}: {condition.message})", None
    return str(status.phase), None
