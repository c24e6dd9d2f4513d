"""Backends by name: ours, and those of other packages."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, EntryPoints

import pytest

import clusterenv as ce
from clusterenv.backends import registry
from clusterenv.backends.contract import CollectsGarbage, PrintsScript
from clusterenv.cli import main


@pytest.fixture
def others(monkeypatch):
    """Entry points of other packages, as name → values."""

    def install(**values):
        points = [EntryPoint(name, value, registry.GROUP) for name, all_ in values.items() for value in all_]
        monkeypatch.setattr(
            "importlib.metadata.entry_points", lambda group, **of: EntryPoints(points).select(group=group, **of)
        )

    install()
    return install


class Flaky(ce.Manual):
    name = "flaky"

    @staticmethod
    def collect_garbage(note, deadline):
        raise RuntimeError("a bug in another package")


def test_ours_are_found_without_an_installation(others):
    assert [registry.find(name) for name in registry.names()] == [
        ce.Local,
        ce.Loopback,
        ce.Manual,
        ce.Slurm,
        ce.Kubernetes,
        ce.Ray,
        ce.Command,
    ]
    backends = [ce.Slurm(nodes=1), ce.Kubernetes(nodes=1, image="x"), ce.Ray(nodes=1)]
    assert all(isinstance(backend, CollectsGarbage) for backend in backends)
    assert all(registry.find(backend.name) is type(backend) for backend in backends)
    assert [isinstance(backend, PrintsScript) for backend in backends] == [True, True, False]


def test_those_of_other_packages(others):
    others(flaky=[f"{__name__}:Flaky"], slurm=["elsewhere:Slurm"])
    assert registry.find("flaky").__name__ == "Flaky" and "flaky" in registry.names()
    assert registry.find("slurm") is ce.Slurm, "nobody replaces ours"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "there is no backend 'other', only local, loopback, manual, slurm, kubernetes, ray, command"),
        (["a:A", "b:B"], "several packages have a backend 'other': a:A and b:B"),
        (["no_such_module_here:A"], r"'other' \(no_such_module_here:A\) cannot be loaded: ModuleNotFoundError"),
        (["os:path"], r"'other' \(os:path\) is no class"),
    ],
)
def test_one_that_cannot_be_used(others, values, text):
    others(other=values)
    with pytest.raises(ce.SpecError, match=text):
        registry.find("other")


def test_a_backend_named_by_text(others):
    with pytest.raises(ce.SpecError, match=r"write backend=Kubernetes\(nodes=\.\.\., image=\.\.\.\)"):
        ce.ClusterEnv("CartPole-v1", 2, backend="kubernetes")
    others(flaky=[f"{__name__}:Flaky"])
    with pytest.raises(ce.SpecError, match=r"write backend=Flaky\(nodes=\.\.\.\)"):
        ce.ClusterEnv("CartPole-v1", 2, backend="flaky")


def test_gc_goes_on_after_a_backend_that_raises_anything(others, tmp_path, capsys):
    others(flaky=[f"{__name__}:Flaky"], plain=["clusterenv.backends.manual:Manual"])
    note = {"host": "h", "machine": "m", "pid": 1, "started": "1", "lease_s": 60, "left": "it hung"}
    folders = {}
    for run, jobs in (("a", {"flaky": {}}), ("b", {"plain": {}}), ("c", {"gone": {}}), ("d", {})):
        folders[run] = tmp_path / f"clusterenv-{run}"
        folders[run].mkdir()
        (folders[run] / "head.json").write_text(json.dumps({**note, "run": run, "jobs": jobs}))
    assert main(["gc", "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert [folder.exists() for folder in folders.values()] == [True, True, True, False], told
    assert "RuntimeError: a bug in another package" in told and "'plain', which has no collect_garbage()" in told
    assert "there is no backend 'gone'" in told and "3 could not be removed" in told


def test_a_script_is_what_would_be_submitted(capsys):
    assert main(["script", "slurm", "folder=/keys", "python=python3", "allow_pickle=false"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("exec python3 -m clusterenv node --join /keys/clusterenv-RUN/node-0.key ")
    assert "--no-pickle" in last.split()
    assert main(["script", "manual"]) == 0
    assert capsys.readouterr().out == "clusterenv node --join node-0.key\n"
    for name, text in (("ray", "Ray submits no text"), ("local", "Local submits no text"), ("slrum", "no backend")):
        assert main(["script", name]) == 2
        assert text in capsys.readouterr().err
