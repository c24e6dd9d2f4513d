"""The words of shared memory in which a worker says what it is doing, and the head what cannot wait for a message.

Each worker has a cache line of 64-bit words. It writes the slot and the phase before it calls user code, so that the
head can name what hangs; and the step of the fragment that it is in: one environment alone would otherwise look as if
it stood still. The head writes the bell after each message, and STOP where a fragment has to end early.
"""

from __future__ import annotations

__all__ = ["CALL", "INIT", "PHASES", "POLICY", "RESET", "STEP", "STOP", "TICK"]

TICK, STOP = 3, 4
"""Words: the running fragment's step, and whether it is to end early, because the machine is about to go."""

INIT, RESET, STEP, CALL, POLICY = range(5)
"""Values of the word that says the phase."""
PHASES = ("init", "reset", "step", "call", "policy")
