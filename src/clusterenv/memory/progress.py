"""The words of shared memory in which a worker says what it is doing, and the head what cannot wait for a message.

Of each worker, word 0 is the slot and word 1 the phase in which it calls user code, so that the head can name what
hangs; the others are named below.
"""

from __future__ import annotations

__all__ = ["BELL", "CALL", "INIT", "PHASES", "POLICY", "PROGRESS_BYTES", "RESET", "STEP", "STOP", "TICK"]

PROGRESS_BYTES = 64
"""Progress words of one worker: a cache line each, so that workers do not share one."""

BELL, TICK, STOP = 2, 3, 4
"""Which word the head changes after it sent something: looking at it takes no system call. Which one counts the steps
of a fragment: one environment alone would otherwise look as if it stood still. Which one asks a fragment to end early,
because the machine is about to go."""

INIT, RESET, STEP, CALL, POLICY = range(5)
"""Values of the word that says the phase."""
PHASES = ("init", "reset", "step", "call", "policy")
