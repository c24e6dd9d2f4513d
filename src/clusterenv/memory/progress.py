"""Words of shared memory in which a worker shows what it is doing, and the head signals what cannot wait for a message.

For each worker, word 0 is the slot and word 1 the phase in which it calls user code, so that the head can tell what
hangs; the others are named below.
"""

from __future__ import annotations

__all__ = ["BELL", "CALL", "INIT", "LINK", "PHASES", "POLICY", "PROGRESS_BYTES", "RESET", "STEP", "STOP", "TICK"]

PROGRESS_BYTES = 64
"""Progress words of one worker: a cache line each, so that workers do not share one."""

BELL, TICK, STOP, LINK = 2, 3, 4, 5
"""Indices of further words. BELL: changed by the head after it sent something; reading it takes no system call. TICK:
counts the steps of a fragment; without it, a worker with one environment would seem to hang. STOP: asks a fragment to
end early, because the machine is about to go away. LINK: the worker's share of the link to the head, in kB/s; 0: not
measured yet."""

INIT, RESET, STEP, CALL, POLICY = range(5)
"""Values of the word for the phase."""
PHASES = ("init", "reset", "step", "call", "policy")
