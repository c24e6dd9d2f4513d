"""The backend of docs/backends.md as a package: installed, found by its entry point, and held to the contract."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text()

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]


def block(language):
    """The one block of the page in this language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return text


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """A virtual environment with the packages of this one, and with the backend installed from a folder."""
    project, venv = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("venv")
    (project / "clusterenv_ssh.py").write_text(block("python"))
    (project / "pyproject.toml").write_text(block("toml"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    found = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    own = [path for path in sys.path if path.endswith("/site-packages") or Path(path).resolve() == ROOT / "src"]
    (Path(found.strip()) / "base.pth").write_text("\n".join(own))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--no-index", str(project)], check=True)
    return python


def test_it_passes_the_contract(interpreter, tmp_path):
    (tmp_path / "test_ssh.py").write_text(block("py"))
    command = [interpreter, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_ssh.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 passed" in done.stdout, done.stdout


def test_it_is_found_by_name(interpreter, tmp_path):
    command = [interpreter, "-m", "clusterenv", "script", "ssh", 'hosts=["n1", "n2"]', "folder=/keys"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    line = f"exec {interpreter} -m clusterenv node --join /keys/clusterenv-RUN/node-0.key"
    assert done.stdout == f"ssh -o BatchMode=yes n1 '{line}'\n"
    code = "import clusterenv as ce; ce.ClusterEnv('CartPole-v1', 2, backend='ssh')"
    done = subprocess.run([interpreter, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "write backend=Ssh(nodes=..., hosts=...)" in done.stderr, done.stderr


def test_a_package_that_is_not_installed_is_named():
    """The note of its run is kept for when it is."""
    command = [sys.executable, "-m", "clusterenv", "script", "ssh", 'hosts=["n1"]']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 2 and "there is no backend 'ssh'" in done.stderr and "'clusterenv.backends'" in done.stderr
    )
