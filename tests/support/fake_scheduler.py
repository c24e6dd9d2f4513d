"""A fake scheduler, for tests without a cluster: `fsub`, `fstat` and `fdel`; its jobs are processes of this machine.

A program hangs while the folder has a file `hang-NAME`, and fails while it has `fail-NAME`. While it has a file
`state`, jobs are not started, and are listed in the state that the file has.
"""

from __future__ import annotations

import os
from pathlib import Path

OPTIONS = {"submit": "fsub {script}", "status": "fstat", "cancel": "fdel {jobs}"}

_HEAD = """#!/bin/bash
cd {folder}
name=$(basename "$0")
if [ -e hang-$name ]; then exec sleep 1000; fi
if [ -e fail-$name ]; then echo "$name: no answer from the master" >&2; exit 1; fi
"""

_PROGRAMS = {
    "fsub": """
id=$(( $(ls jobs | wc -l) + 1 ))
if [ $# -gt 0 ]; then cp "${{@: -1}}" jobs/$id; else cat > jobs/$id; fi
if [ -e state ]; then
    cp state states/$id
else
    setsid bash jobs/$id < /dev/null > log-$id 2>&1 &
    echo $! > pids/$id
    echo RUNNING > states/$id
fi
echo "Job <$id> is submitted"
""",
    "fstat": """
echo "JOB STATE"
for id in $(ls states); do
    if [ -e pids/$id ] && ! kill -0 $(cat pids/$id) 2> /dev/null; then rm states/$id; continue; fi
    echo "$id $(cat states/$id)"
done
""",
    "fdel": """
code=0
for id in "$@"; do
    if [ -e states/$id ] && {{ [ ! -e pids/$id ] || kill -TERM $(cat pids/$id) 2> /dev/null; }}; then
        rm states/$id
        echo $id >> cancelled
    else
        echo "job $id does not exist" >&2
        code=1
    fi
done
exit $code
""",
    "fwhy": 'echo "the job $1 waits"; echo "  for a slot"',
}


def install(folder: Path, monkeypatch) -> Path:
    """Put the programs first on PATH; return the folder that they work in."""
    for name in ("bin", "jobs", "pids", "states"):
        (folder / name).mkdir(parents=True)
    for name, body in _PROGRAMS.items():
        path = folder / "bin" / name
        path.write_text((_HEAD + body).format(folder=folder))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return folder
