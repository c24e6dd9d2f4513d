"""Find out which job of a scheduler this process belongs to, from the variables that schedulers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["OwnJob", "own_job"]

_NUMBERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""SLURM, PBS, LSF, Grid Engine."""


class OwnJob(NamedTuple):
    number: str = ""
    """As the scheduler writes it; a pod's name; empty: no job."""
    ends_at: float | None = None
    """When the scheduler ends it (Unix time), if it says so."""


def own_job(variables: Mapping[str, str] = os.environ) -> OwnJob:
    number = next((variables[name] for name in _NUMBERS if variables.get(name)), "")
    if not number and "KUBERNETES_SERVICE_HOST" in variables:
        number = variables.get("HOSTNAME", "")
    end = variables.get("SLURM_JOB_END_TIME", "")
    return OwnJob(number[:100], float(end) if end.isdecimal() else None)
