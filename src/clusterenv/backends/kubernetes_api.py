"""Call the Kubernetes API, and delete a run, at its end or for `clusterenv gc`.

The official client is imported when the first `Api` is created.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterenv.errors import StartError

RUN = "clusterenv/run"
SEEN = "clusterenv/seen"
"""Annotation of the run object: when the head was last alive."""

LEASE = "clusterenv/lease-s"
_SLACK_S = 180.0  # added to the lease, for late updates and clock differences

_INSIDE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_GRACE_S = 5
_GONE_S = 5.0  # how long to wait for deleted pods to disappear before removing them by force


class Api:
    """A connection to one cluster. Reads the credentials again when they are no longer accepted."""

    def __init__(self, kubeconfig: str | None = None, context: str | None = None) -> None:
        self._kubeconfig, self._context = kubeconfig or os.environ.get("KUBECONFIG"), context
        self._core: Any = None
        self.namespace = "default"  # of the kubeconfig's context, or of the pod in which this process runs
        self.server = ""
        """The address of the API server; "" within a pod, where it differs from the outside address."""
        self._connect()

    def _connect(self) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise StartError('Kubernetes(...) needs its client: pip install "clusterenv[kubernetes]"') from None
        settings = client.Configuration()
        try:
            if self._kubeconfig is None and _INSIDE.exists():
                config.load_incluster_config(client_configuration=settings)
                self.namespace = _INSIDE.read_text().strip()
            else:
                file, context = self._kubeconfig, self._context
                config.load_kube_config(file, context, client_configuration=settings, persist_config=False)
                contexts, active = config.list_kube_config_contexts(file)
                chosen = next((item for item in contexts if item["name"] == context), active)
                self._context, self.namespace = chosen["name"], chosen["context"].get("namespace", "default")
                self.server = settings.host
        except (config.ConfigException, OSError, TypeError) as error:
            raise StartError(f"Kubernetes: no usable kubeconfig was found: {error}") from None
        settings.retries = 1  # an idle connection may have been closed
        self.close()
        self._core = client.CoreV1Api(client.ApiClient(settings))

    @property
    def note(self) -> dict[str, Any]:
        """The facts that `collect` needs to find the same cluster."""
        return {"kubeconfig": self._kubeconfig, "context": self._context, "server": self.server}

    def ask(self, what: str, *args: Any, none_if: int = 0, timeout_s: float = 10.0, **options: Any) -> Any:
        """Call this client method; return None if the HTTP status is `none_if`. Raises `StartError` for all errors."""
        for attempt in range(2):
            try:
                return getattr(self._core, what)(*args, _request_timeout=timeout_s, **options)
            except Exception as error:  # the client raises its own errors and urllib3's
                status = getattr(error, "status", None)
                if status is not None and status == none_if:
                    return None
                if status != 401 or attempt:
                    raise _start_error(error) from None
            with contextlib.suppress(StartError):
                self._connect()  # an expired token may have been renewed
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._core is not None:
            self._core.api_client.close()


def labels(run: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "clusterenv", RUN: run}


def selector(run: str) -> str:
    return f"{RUN}={run}"


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def delete_run(api: Api, namespace: str, run: str, deadline: float) -> None:
    """Delete the run object and its pods, and wait until the pods are gone. Raises if that fails.

    Kubernetes deletes the Secrets with the run object, which owns them: the head needs no right to delete Secrets.
    `deadline` is on the monotonic clock.
    """

    def ask(what: str, *args: Any, **options: Any) -> Any:
        # Half of the time left: the client tries twice.
        return api.ask(what, *args, timeout_s=max(0.5, (deadline - time.monotonic()) / 2), **options)

    pods = {"label_selector": selector(run)}
    # The API server removes pods that are not running at once.
    ask("delete_collection_namespaced_pod", namespace, grace_period_seconds=_GRACE_S, **pods)
    ask("delete_namespaced_config_map", f"clusterenv-{run}", namespace, none_if=404)
    patience = min(deadline - 1.0, time.monotonic() + _GONE_S)
    while ask("list_namespaced_pod", namespace, **pods).items:
        if time.monotonic() > patience:  # the grace period is over, but a kubelet has not reported it
            ask("delete_collection_namespaced_pod", namespace, grace_period_seconds=0, **pods)
            return
        time.sleep(0.3)


def collect(facts: Mapping[str, Any], deadline: float) -> str:
    """Delete the run that a note names, and return a line that says so. Raises if that fails."""
    api = Api(facts["kubeconfig"], facts["context"])
    try:
        if facts["server"] not in ("", api.server):
            server = api.server or "no server"
            raise StartError(f"the run is on {facts['server']}, but the kubeconfig names {server} now")
        delete_run(api, facts["namespace"], facts["run"], deadline)
    finally:
        api.close()
    return f"run clusterenv-{facts['run']} in namespace {facts['namespace']} is deleted"


def delete_abandoned(
    namespace: str | None,
    context: str | None,
    dry_run: bool,
    say: Callable[[str], None],
    run: str | None,
    deadline: float,
) -> tuple[int, int]:
    """Delete the runs in a namespace whose head has expired; return the numbers of such runs and of failures.

    `run`: delete only this run, whatever the state of its head.
    """
    api, count, failures = Api(None, context), 0, 0
    namespace = namespace or api.namespace
    try:
        found = api.ask("list_namespaced_config_map", namespace, label_selector=selector(run) if run else RUN)
        for item in found.items:
            number = item.metadata.labels[RUN]
            where = f"run clusterenv-{number} in namespace {namespace}"
            pods = api.ask("list_namespaced_pod", namespace, label_selector=selector(number)).items
            running = sum(pod.status.phase == "Running" for pod in pods)
            is_over, text = _life(item.metadata.annotations or {}, running)
            if not is_over and run is None:
                say(f"{where}: kept, {text}; if you know that it is gone: clusterenv gc --kubernetes --run {number}")
                continue
            count += 1
            say(f"{where}: {'would be deleted' if dry_run else 'deleting'}, {text}")
            if not dry_run:
                try:
                    delete_run(api, namespace, number, deadline)
                except StartError as error:
                    failures += 1
                    say(f"{where}: could not be deleted: {error}")
    finally:
        api.close()
    return count, failures


def _life(annotations: Mapping[str, str], running: int) -> tuple[bool, str]:
    """Return whether a run's head is gone, and why, judging by the run object and the number of running pods."""
    if running:
        return False, f"{running} of its pods are running, and pods end soon after their head"
    try:
        seen = datetime.datetime.fromisoformat(annotations[SEEN])
        age_s = time.time() - seen.timestamp()
        is_over = age_s > float(annotations[LEASE]) + _SLACK_S
    except (KeyError, ValueError):
        return False, "it is unknown when its head was last seen"
    return is_over, f"its head {'has ended' if is_over else 'may be running'} (last seen {age_s:.0f} s ago)"


def _start_error(error: Exception) -> StartError:
    """Return an error with the API server's message, in one line."""
    status, body = getattr(error, "status", None), getattr(error, "body", None)
    with contextlib.suppress(TypeError, ValueError, KeyError):
        text = f"Kubernetes says: {json.loads(body)['message']}"  # type: ignore[arg-type]  # None raises the TypeError suppressed above
        if status == 401:
            text += " (401: the credentials have expired or were revoked; renew them in the kubeconfig)"
        return StartError(text)
    return StartError(f"Kubernetes cannot be reached: {str(getattr(error, 'reason', None) or error)[:300]}")
