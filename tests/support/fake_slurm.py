"""Fake SLURM programs, for tests without a cluster: jobs are processes of this machine.

A program hangs while the folder has a file `hang-NAME`.
"""

from __future__ import annotations

from pathlib import Path

_HANG = """
if [ -e {folder}/hang-$(basename "$0") ]; then exec sleep 1000; fi
"""

_PROGRAMS = {
    "sbatch": """
id=$(( $(ls {folder}/jobs | wc -l) + 1 ))
cat > {folder}/jobs/$id
setsid bash {folder}/jobs/$id < /dev/null > {folder}/log-$id 2>&1 &
echo $id
""",
    "squeue": 'for id in $(ls {folder}/jobs); do echo "$id|RUNNING|None"; done',
    "scancel": 'echo "$@" >> {folder}/scancelled',
    "scontrol": "echo node1; echo node2",
    # Ends neither with its step nor on SIGTERM.
    "srun": """
trap '' TERM
"${{@: -2}}" &
wait
read -r < {folder}/never
""",
}


def install(folder: Path, monkeypatch) -> Path:
    """Put the programs first on PATH; return the folder that they work in."""
    import os

    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    os.mkfifo(folder / "never")
    for name, body in _PROGRAMS.items():
        path = folder / "bin" / name
        path.write_text("#!/bin/bash\n" + (_HANG + body).format(folder=folder))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return folder
