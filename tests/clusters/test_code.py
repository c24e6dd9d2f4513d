"""Environments are found wherever their code lives: registered in the script, beside it, on PYTHONPATH, installed.

Scripts run as a user runs them: in processes of their own, from another folder than the script's.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

import clusterenv as ce
import real
from clusterenv.backends.contract import Plan
from clusterenv.code import packages as sources
from clusterenv.code import versions
from clusterenv.code.missing import missing_package
from clusterenv.engine.requests import Requests
from clusterenv.executors.remote import RemoteExecutor
from clusterenv.node.agent import Agent
from clusterenv.spec import Blueprint
from clusterenv.transport.keys import Joining
from clusterenv.wire.messages import AssignShard, Code, Failed, Lacks
from clusterenv.worker.setup import WorkerConfig
from namespace_cluster import pods
from prefork import agents
from stepping import joined, step_until

SRC = Path(__file__).resolve().parents[2] / "src"

GRID = """
import os

import gymnasium as gym
import numpy as np


class Grid(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)
    action_space = gym.spaces.Discrete(7)
    render_mode = None

    def __init__(self, bonus=1.0):
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {"module": __name__, "has_file": os.path.exists(__file__)}

    def step(self, action):
        return self.observation_space.high, self.bonus, False, False, {}


def make():
    return Grid()
"""

REGISTERING = """
import gymnasium as gym

gym.register("Grid-v0", entry_point="my_envs.grid:Grid")
"""

SCRIPT = """
import beside
import clusterenv as ce
import editable_env
import gymnasium as gym
import minigrid
import numpy as np
import on_path.grids
from gymnasium.wrappers import TransformReward
from minigrid.wrappers import ImgObsWrapper


class InMain(beside.Grid):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"module": __name__}


gym.register("Main-v0", entry_point=InMain)
gym.register("space/Text-v0", entry_point="beside:Grid", kwargs={"bonus": 2.0}, max_episode_steps=9)


def late():
    import lazy_envs

    return lazy_envs.make()


FORMS = {
    "a class, registered": lambda: gym.make("Main-v0"),
    "a string, registered with a namespace and kwargs": lambda: gym.make("space/Text-v0"),
    "a package that registers, with wrappers": lambda: TransformReward(
        ImgObsWrapper(gym.make("MiniGrid-Empty-5x5-v0")), lambda reward: reward + 3
    ),
    "an id with its module": lambda: gym.make("my_envs:Grid-v0"),
    "on PYTHONPATH": lambda: on_path.grids.Grid(),
    "an editable install": editable_env.make,
    "beside the script": beside.make,
    "imported by the thunk": late,
    "in the script": InMain,
}
BACKEND = @BACKEND@

with ce.ClusterEnv(list(FORMS.values()), backend=BACKEND) as envs:
    infos = envs.reset(seed=1)[1]
    modules, has_file = infos["module"], infos["has_file"][infos["_has_file"]]
    rewards = envs.step(np.zeros(len(FORMS), dtype=np.int64))[1]
    import brains  # only now, and only the policy needs it

    policy = ce.NumpyPolicy(brains.forward, {"w": np.ones((7 * 7 * 3, 7), np.float32)}, dist="categorical")
    batch = envs.collector(policy, seed=1).rollout(2)
for form, module, reward in zip(FORMS, modules, rewards):
    print(f"{form}: {module} {reward}")
print("collected", batch.rewards.shape)
print("workers see the files:", has_file.any())

with ce.make_vec("my_envs:Grid-v0", num_envs=2, backend=BACKEND) as envs:
    print("by id:", *envs.reset(seed=1)[1]["module"])
"""

EXPECTED = """
a class, registered: __main__ 1.0
a string, registered with a namespace and kwargs: beside 2.0
a package that registers, with wrappers: None 3.0
an id with its module: my_envs.grid 1.0
on PYTHONPATH: on_path.grids 1.0
an editable install: editable_env 1.0
beside the script: beside 1.0
imported by the thunk: lazy_envs 1.0
in the script: __main__ 1.0
collected (2, 9)
workers see the files: True
by id: my_envs.grid my_envs.grid
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A virtual environment with this one's packages and an editable install; and the folder that was installed.

    That folder is not below the temporary directory, which the pods of the tests see.
    """
    project = Path(tempfile.mkdtemp(prefix="clusterenv-editable-", dir="/var/tmp"))
    write(
        project,
        {
            "src/editable_env/__init__.py": GRID,
            "pyproject.toml": """
                [build-system]
                requires = ["setuptools"]
                build-backend = "setuptools.build_meta"

                [project]
                name = "editable-env"
                version = "0.1"
            """,
        },
    )
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    found = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    site = Path(found.strip())
    own = [path for path in sys.path if path.endswith("/site-packages") or Path(path).resolve() == SRC]
    (site / "base.pth").write_text("\n".join(own))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--no-index", "-e", str(project)], check=True)
    yield python, project
    shutil.rmtree(project)


def run(python: Path | str, script: Path, cwd: Path, *on_path: Path) -> list[str]:
    """Return the lines that the script printed; a script that fails fails the test with all that it said."""
    known = filter(None, [*map(str, on_path), os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [str(python), str(script)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(known)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overriding environment" not in done.stderr, "a package that registers is imported again in the workers"
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize(
    "kind",
    [
        "local",
        "network",
        pytest.param("slurm", marks=[pytest.mark.slurm, pytest.mark.smoke]),
        pytest.param("kubernetes", marks=[pytest.mark.kubernetes, pytest.mark.smoke]),
    ],
)
def test_code_is_found_wherever_it_lives(kind, interpreter, tmp_path):
    """The pods see none of the user's files."""
    python, _ = interpreter
    if kind == "local":
        backend = "ce.Local(workers=3)"
    elif kind == "network":
        backend = "ce.Loopback(nodes=2)"
    elif kind == "slurm":
        backend = f"ce.Slurm(nodes=2, interface='lo', folder={str(tmp_path / 'keys')!r})"
    else:
        cluster = pods(real.running["kubernetes"], python=str(python))
        given = {item.name: getattr(cluster, item.name) for item in dataclasses.fields(cluster)}
        backend = f"ce.Kubernetes(**{given!r})"
    with tempfile.TemporaryDirectory(prefix="clusterenv-project-", dir="/var/tmp") as name:
        folder = Path(name)
        write(
            folder / "project",
            {
                "train.py": SCRIPT.replace("@BACKEND@", backend),
                "beside.py": GRID,
                "lazy_envs.py": "from helpers.more import make\n",
                "helpers/__init__.py": "",
                "helpers/more.py": GRID.replace("__name__", "'lazy_envs'"),
                "my_envs/__init__.py": REGISTERING,
                "my_envs/grid.py": GRID,
                "brains.py": "def forward(weights, obs):\n    return obs.reshape(len(obs), -1) / 255 @ weights['w']\n",
            },
        )
        write(folder / "libs", {"on_path/__init__.py": "", "on_path/grids.py": GRID})
        output = run(python, folder / "project" / "train.py", tmp_path, folder / "libs")
    expected = EXPECTED.replace("files: True", "files: False") if kind == "kubernetes" else EXPECTED
    assert output == expected.strip().splitlines()


# -- Gymnasium's registry -----------------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(gym.registry)
    yield
    gym.registry.clear()
    gym.registry.update(before)


def test_a_spec_that_cannot_be_pickled_stops_only_who_makes_it(registry):
    gym.register("Locked-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", kwargs={"x": threading.Lock()})
    backend = ce.Local(workers=1)
    with ce.ClusterEnv([lambda: gym.make("CartPole-v1")], backend=backend) as envs:
        assert envs.reset(seed=1)[0].shape == (1, 4)
    with pytest.raises(
        ce.EnvError, match=r"'Locked-v0' is registered in the script, but .* cannot pickle '_thread.lock'"
    ):
        ce.ClusterEnv([lambda: gym.make("Locked-v0")], backend=backend)


def test_what_the_script_registers_in_place_of_gymnasiums_own(registry):
    from gymnasium.wrappers import TimeLimit

    class Short(TimeLimit):
        def __init__(self, **kwargs):
            super().__init__(gym.make("MountainCar-v0").unwrapped, 7)

    with pytest.warns(UserWarning, match="Overriding"):
        gym.register("CartPole-v1", entry_point=Short)
    thunks = [lambda: gym.make("CartPole-v1"), lambda: gym.make("CartPole-v1")]
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=1)) as envs:
        assert envs.single_observation_space.shape == (2,) and envs.get_attr("_max_episode_steps") == (7, 7)
    del gym.registry["CartPole-v1"]  # only the workers' copy is the script's
    with ce.ClusterEnv("MountainCar-v0", 1, backend=ce.Local(workers=0)):
        assert "CartPole-v1" not in gym.registry


def test_ids_as_gymnasium_takes_them(registry, tmp_path, monkeypatch):
    write(tmp_path, {"some_envs.py": GRID + 'gym.register("Some-v2", entry_point="some_envs:Grid")\n'})
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("some_envs:Some-v2", "some_envs:Some"):
        with ce.make_vec(name, 1, backend=ce.Local(workers=0)) as envs:
            assert envs.spec.id == "Some-v2"
    with pytest.raises(ce.SpecError, match=r"unknown environment id 'no_envs:Some-v2': No module named 'no_envs'"):
        ce.ClusterEnv("no_envs:Some-v2", 1)
    with pytest.raises(ce.SpecError, match=r"unknown environment id 'some_envs:Other-v0'"):
        ce.ClusterEnv("some_envs:Other-v0", 1)


def test_an_id_with_its_module_needs_no_code(tmp_path):
    """`allow_pickle=False`: the node imports the module itself."""
    write(tmp_path / "libs", {"my_envs/__init__.py": REGISTERING, "my_envs/grid.py": GRID})
    backend = "ce.Loopback(nodes=1, allow_pickle=False)"
    script = f"""
        import clusterenv as ce
        import gymnasium as gym

        with ce.make_vec("my_envs:Grid-v0", 2, backend={backend}) as envs:
            print(*envs.reset(seed=1)[1]["module"])
        gym.register("Mine-v0", entry_point="my_envs.grid:Grid")
        try:
            ce.make_vec("Mine-v0", 2, backend={backend})
        except ce.SpecError as error:
            print([line for line in str(error).splitlines() if "Mine-v0" in line][-1])
    """
    write(tmp_path, {"train.py": script})
    lines = run(sys.executable, tmp_path / "train.py", tmp_path, tmp_path / "libs")
    assert lines[0] == "my_envs.grid my_envs.grid"
    assert "'Mine-v0' is not registered on a node" in lines[1] and 'use "package:Name-v0"' in lines[1]


# -- random numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [False, True], ids=["local", "network"])
def test_workers_draw_different_numbers(network):
    """torch is imported by the process that they are all forked from."""
    import random

    import torch

    class Drawing(gym.Env):
        observation_space = action_space = gym.spaces.Discrete(2)

        def __init__(self):
            self.drawn = {"torch": torch.rand(1).item(), "numpy": np.random.rand(), "random": random.random()}

        def reset(self, *, seed=None, options=None):
            return 0, {}

    backend = ce.Loopback(nodes=1, workers_per_node=4) if network else ce.Local(workers=4)
    with ce.ClusterEnv([Drawing] * 4, backend=backend) as envs:
        drawn = envs.get_attr("drawn")
    for name in ("torch", "numpy", "random"):
        assert len({each[name] for each in drawn}) == 4, name


# -- the user's own files on other machines -----------------------------------------------------------------------


@pytest.mark.parametrize("package", ["gymnasium", "vendored"])
def test_packages_below_the_folder_of_the_start(package, tmp_path):
    """On PYTHONPATH, as on many clusters; one with the metadata that `pip install --target` leaves, one without."""
    libs = tmp_path / "libs"
    if package == "gymnasium":
        shutil.copytree(Path(gym.__file__).parent, libs / "gymnasium", ignore=shutil.ignore_patterns("__pycache__"))
        thunk = "lambda: gym.make('CartPole-v1')"
    else:
        # What cannot be pickled, as many packages have it, and a reference to the whole module.
        write(libs, {"vendored/__init__.py": "import sys, threading\nfrom .grid import make\nLOCK = threading.Lock()"})
        write(libs, {"vendored/grid.py": GRID.replace("return Grid()", "with vendored.LOCK: return Grid()")})
        (libs / "vendored" / "grid.py").write_text("import vendored\n" + (libs / "vendored" / "grid.py").read_text())
        write(libs, {"vendored-1.0.dist-info/RECORD": "vendored/__init__.py,,\nvendored/grid.py,,\n"})
        thunk = "vendored.make"
    script = f"""
        import clusterenv as ce
        import gymnasium as gym
        import {package}

        with ce.ClusterEnv([{thunk}] * 2, backend=ce.Loopback(nodes=1)) as envs:
            print(envs.reset(seed=1)[0].shape[0], {package}.__file__)
    """
    write(tmp_path, {"train.py": script})
    assert run(sys.executable, tmp_path / "train.py", tmp_path, libs) == [f"2 {libs}/{package}/__init__.py"]


OWN = {
    "shipped/__init__.py": "from . import deep\n",
    "shipped/deep/inner.py": GRID,  # a folder without __init__.py
    "shipped/data.json": "{}",
    "alone.py": "import importlib\n\ndef late():\n    return importlib.import_module('dynamic').VALUE\n",
    "dynamic.py": "VALUE = 7\n",
    "unrelated.py": "raise ImportError\n",
    "data/values.csv": "1,2",
    "fast/__init__.py": "from fast_helpers import make\n",
    "fast_helpers.py": GRID,
    "pipped/__init__.py": "",
    "piped_in-2.0.dist-info/RECORD": "pipped/__init__.py,,\npiped_in-2.0.dist-info/RECORD,,\n",
    "fast/core.cpython-311-x86_64-linux-gnu.so": "",
}


def test_packages_travel_whole_and_only_where_they_are_missing(tmp_path, monkeypatch):
    write(tmp_path / "here", OWN)
    (tmp_path / "here" / "shipped" / "old.py").write_bytes(b"# coding: latin-1\nimport fran\xe7ais, (\n")
    monkeypatch.syspath_prepend(tmp_path / "here")
    words = ["shipped.deep.inner", "alone:late", "data", "json", "numpy", "pytest", "fast", "pipped", "step"]
    found = sources.collect(words)
    names = {package.wanted.name for package in found}
    assert names == {"shipped", "alone", "dynamic", "fast", "fast_helpers"}
    assert [package.wanted.name for package in found if package.unsendable] == ["fast"]
    assert {p.wanted.name for p in sources.collect(words, known=("shipped", "alone"))} == {"fast", "fast_helpers"}
    wanted = [package.wanted for package in found]
    assert sources.compare(wanted) == ({}, ()), "this process can import them"
    archive = tmp_path / "archive"
    archive.write_bytes(sources.pack(found))
    check = f"""
        import importlib, pathlib, sys
        from clusterenv.code import packages as sources
        wanted = {[tuple(each) for each in wanted]!r}
        comparison = sources.compare([sources.Wanted(*each) for each in wanted])
        print(sorted(comparison.folders), sorted(comparison.lacking))
        sources.install(comparison.folders, pathlib.Path({str(archive)!r}).read_bytes() if comparison.lacking else b"")
        import alone, shipped.deep.inner
        print(alone.late(), shipped.deep.inner.make().bonus, alone.__file__)
        try:
            shipped.missing()
        except AttributeError as error:
            print(error)
        try:
            import fast
            print("found", fast.__name__)
        except ModuleNotFoundError as error:
            print(error)
    """
    write(tmp_path, {"check.py": check})
    here = str(tmp_path / "here")
    attribute = "module 'shipped' has no attribute 'missing'"
    done = [f"7 1.0 {here}/alone.py", attribute]
    every = ["alone", "dynamic", "fast", "fast_helpers", "shipped"]
    # In the same folder, where Python does not look by itself
    assert run(sys.executable, tmp_path / "check.py", tmp_path) == [f"{every} []", *done, "found fast"]
    # Changed since: the node's files are not those of the head
    os.utime(tmp_path / "here" / "alone.py", (1, 1))
    lines = run(sys.executable, tmp_path / "check.py", tmp_path, tmp_path / "here")
    assert lines == ["[] ['alone']", *done, "found fast"]
    # Nowhere
    shutil.rmtree(tmp_path / "here")
    lines = run(sys.executable, tmp_path / "check.py", tmp_path)
    assert lines == [f"[] {every}", *done, "No module named 'fast'"]


def test_a_folder_with_too_much_in_it_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_ENTRIES", 3)
    write(tmp_path, {**OWN, **{f"data/{i}.py": "" for i in range(4)}})
    monkeypatch.syspath_prepend(tmp_path)
    assert sources.find_own("data") is None, "a folder like any other"
    package = sources.find_own("shipped")
    assert package.wanted.fingerprint == "" and "more than 3 entries" in package.unsendable
    assert sources.compare([package.wanted]).lacking == (), "where it can be imported, it is"


@pytest.mark.network
def test_a_node_that_has_none_of_the_files(tmp_path, monkeypatch, caplog):
    """And the one that replaces it. Its machine is a mount namespace in which the project's folder is empty."""
    write(tmp_path, OWN)
    monkeypatch.syspath_prepend(tmp_path)
    command = Plan.command

    def hidden(plan: Plan, node: int) -> list[str]:
        steps = f"mount -t tmpfs none {shlex.quote(str(tmp_path))} && cd / && exec {shlex.join(command(plan, node))}"
        return ["unshare", "--mount", "sh", "-c", f'{steps} "$@"', "sh"]

    monkeypatch.setattr(Plan, "command", hidden)
    inner, alone = importlib.import_module("shipped.deep.inner"), importlib.import_module("alone")
    importlib.import_module("fast")

    def thunk():
        env = inner.make()
        env.late = alone.late()
        return env

    def forward(weights, obs):
        from shipped.deep import inner

        return obs.reshape(len(obs), -1) / 255 @ weights["w"] * inner.make().bonus

    backend = ce.Loopback(nodes=1, heartbeat_s=(0.2, 1.5, 3.0))
    with ce.ClusterEnv([thunk] * 2, backend=backend, recovery=ce.Recovery(backoff_s=(0.05, 0.1))) as envs:
        policy = ce.NumpyPolicy(forward, {"w": np.ones((147, 7), np.float32)}, dist="categorical")
        assert envs.get_attr("late") == (7, 7) and envs.collector(policy, seed=1).rollout(4).valid.all()
        envs.reset(seed=1)
        (agent,) = agents()
        agent.kill()
        step_until(envs, lambda: joined(envs) == 2, 15)
        assert envs.get_attr("late") == (7, 7)

    def compiled():
        import fast

        return fast.make()

    with pytest.raises(ce.EnvError, match=r"'fast' is missing on .* was not sent because it has compiled modules"):
        ce.ClusterEnv([compiled] * 2, backend=backend)
    assert "node 0 cannot import 'fast' as it is in" in caplog.text


def test_a_node_that_takes_no_code_takes_no_files():
    """Nor does it look into folders that a head names."""
    joining = Joining("run", 0, "tcp://127.0.0.1:1", "", "", "")
    said = []
    agent = Agent(joining, allow_pickle=False)
    agent._say = lambda message, payload=(): said.append(message)
    host = AssignShard(
        3, ((0, (0,)),), 1, None, None, True, 1, (), "refuse", True, (sources.Wanted("alone", "", "/tmp"),)
    )
    agent._host(host, b"{}")
    os.close(agent._wake_read)
    os.close(agent._wake_write)
    agent._weights.close()
    assert said == [Failed(3, "this node takes no pickled code (--no-pickle)")]


@pytest.mark.parametrize("asked", [[("other",)], [("alone",), ("alone",)]], ids=["not offered", "twice"])
def test_files_are_sent_once_and_only_those_offered(asked, tmp_path, monkeypatch):
    write(tmp_path, OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sent = []
    head = SimpleNamespace(
        roster=SimpleNamespace(holder=lambda shard: 0, session=lambda node: 1),
        shard_events=deque(),
        inbox=SimpleNamespace(open_bytes=[0]),
        progress=SimpleNamespace(expect=lambda shard_of, phases: None),
        send=lambda shard, message, payload=(): sent.append(message),
    )
    blueprint = Blueprint(1, b"", False, None, packages=sources.collect(["alone"]))
    executor = RemoteExecutor(head, blueprint, Requests([[0]]), [[0]], [0], WorkerConfig(None, True))
    executor.start(0)
    assert {wanted.name for wanted in sent[0].packages} == {"alone", "dynamic"}
    with pytest.raises(ce.ProtocolError, match="not offered, or were sent already"):
        for names in asked:
            executor._open(0, Lacks(0, names), [])
    assert [message for message in sent if isinstance(message, Code)] == [Code(0)] * (len(asked) - 1)


def test_the_advice_for_a_missing_module_names_it_and_applies(tmp_path, monkeypatch):
    write(tmp_path, OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("alone", "fast"):  # of another test
        monkeypatch.delitem(sys.modules, name, raising=False)

    def advice(name: str) -> str:
        return missing_package(f"ModuleNotFoundError: No module named {name!r}", "node 3")

    assert "package 'pytest' is missing on node 3: install it there" in advice("pytest")
    assert "package 'nosuch' is missing on node 3: install it there. It cannot be imported here, eith" in advice(
        "nosuch"
    )
    assert "'numpy' on node 3 has no module 'numpy.nosuch': install the same version" in advice("numpy.nosuch")
    assert f"here it is in {tmp_path}" in advice("alone") and "import it at the top of the script" in advice("alone")
    assert "compiled modules" in advice("fast") and "PYTHONPATH" in advice("fast")
    assert missing_package("ValueError: no", "node 3") == ""


# -- versions -----------------------------------------------------------------------------------------------------


def test_versions_that_have_to_fit():
    ours = {"cloudpickle": "3.1.2", "numpy": "2.4.6", "torch": "2.13.0+cpu"}
    assert versions.differences(ours, ours, ours) == []
    near = {"cloudpickle": "3.1.0", "numpy": "2.0.1", "torch": "2.13.1+cu130"}
    assert versions.differences(near, ours, ours) == []
    far = {"cloudpickle": "3.0.9", "numpy": "1.26.4", "torch": "2.12.0"}
    assert versions.differences(far, ours, ours) == [
        "cloudpickle 3.0.9 there, 3.1.2 here",
        "numpy 1.26.4 there, 2.4.6 here",
        "torch 2.12.0 there, 2.13.0+cpu here",
    ]
    assert versions.differences({}, ours, ["torch"]) == ["torch is not installed there, 2.13.0+cpu is here"]
    assert versions.differences(far, ours, ["torch"], is_pickled=False) == []
    here = {*ours, "onnxruntime"}
    assert set(versions.installed()) == here, "torch is installed, and need not be imported"


@pytest.mark.guarantee(20)
def test_a_node_with_another_cloudpickle_is_refused(monkeypatch):
    here = {**versions.installed(), "cloudpickle": "2.9.0"}
    there = versions.installed()["cloudpickle"]
    monkeypatch.setattr(versions, "installed", lambda: here)
    with pytest.raises(ce.StartError, match=rf"versions differ: cloudpickle {there} there, 2.9.0 here"):
        ce.ClusterEnv("CartPole-v1", 1, backend=ce.Loopback(nodes=1))


@pytest.mark.guarantee(20)
def test_torch_matters_to_policies_of_torch(monkeypatch):
    import torch

    monkeypatch.setattr(versions, "installed", lambda: {"cloudpickle": "3.1.2", "numpy": "2.4.6", "torch": "1.0"})
    with ce.ClusterEnv("CartPole-v1", 1, backend=ce.Loopback(nodes=1)) as envs:
        with pytest.raises(ce.PolicyError, match=r"cannot run on node 0 .*: torch 2\..* there, 1.0 here"):
            envs.collector(ce.TorchPolicy(torch.nn.Linear(4, 2), dist="categorical", runtime="torch"))
        assert envs.collector(ce.RandomPolicy(), seed=1).rollout(2).valid.all()
