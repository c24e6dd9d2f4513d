"""Limits above which the doctor calls something a cause, each with its reason."""

from __future__ import annotations

__all__: list[str] = []

RECENT_S = 15.0
"""Conditions are judged over this time: long enough for medians over noise, short enough to see a fault that has just
begun."""
FEW = 3
"""Fewer samples than this are too few to tell a condition from a moment."""

# -- workers --

HANG_S = 5.0
"""One call of a local environment that has taken this long, and ten times its usual time."""
REMOTE_HANG_S = 15.0
"""The same on a node: while an answer travels over a slow link, its worker shows no progress either."""
BUILD_HANG_S = 60.0
"""Building an environment may load assets or compile: `init`, and methods called by `call`, may take this long."""
HANG_FACTOR = 10.0
SILENT_TRACE_S = 65.0
"""A worker is asked for its stack after 30 s and 60 s in one call; one that has not answered by then cannot run."""
STOPPED_S = 1.0
"""A process that the kernel shows as stopped needs no longer wait to be called stopped."""
NO_CPU = 0.01

SLOW_FACTOR = 3.0
"""Steps of one environment against the median of the others; those of one kind differ less, even on a busy machine."""
SLOW_FACTOR_BUSY = 5.0
"""The same on a machine without a free core, where steps are interrupted."""
SLOW_S = 0.001
"""Shorter differences between steps are scheduling noise."""
CONFIRMED = 0.75
"""Share of the extra time that must show in the worker's fragments: only some steps are timed, and a single one that
was interrupted shows for long in a run that makes few steps."""
MATTERS = 0.1
"""What costs less than this share of the throughput is not worth a finding."""
PROFILE = 5
"""Samples in which a worker was busy that are needed to say where it spends its time."""
RESET_SHARE = 0.3
"""Share of a worker's busy samples in `reset`. A reset costs more than a step, but episodes have many steps."""
ONE_PLACE = 0.8
"""Share of a worker's busy samples in one slot: with two slots or more, equal ones would have at most half."""
SLOW_WORKER_FACTOR = 2.5
"""Both environment and policy of a worker against the median of the others: more than the noise of a shared machine."""
ALIKE = 3.0
"""Environment against policy: how much more the one may be slowed down than the other by a lack of CPU."""

WAITING_STEPS = 0.6
"""Share of a worker's time in its environments from which these decide the speed of the run."""
WAITING_CPU = 0.4
"""Share of a core that workers use, or want to use, whose environments mostly wait."""

WARM_S = 20.0
"""Age of a run before which its workers' memory may grow: imports, assets, caches."""
GROWN_BYTES = 16 << 20
"""Within the time that the doctor watches; less is the noise of an allocator."""
FULL_S = 7200.0
"""The machine's memory would be full within this time."""

CRASHES = 3
"""Losses of one slot or worker in the window below that are a loop; two, if their reasons are alike."""
CRASH_WINDOW_S = 600.0
"""`Recovery.restart_window_s` counts in the same window."""
CRASH_RECENT_S = 180.0
"""The pause before a restart grows to 60 s: a loop without a loss for three times that has ended."""
LOSS_RECENT_S = 60.0
"""A single loss is over when the worker runs again; it is named for a minute."""

# -- machines --

SWAP_BYTES_PER_S = 1e6
"""Less is the kernel tidying up idle pages."""
THROTTLED = 0.2
"""Share of CPU periods. A process at its quota's edge is throttled in a few; beyond a fifth it runs out of quota."""
BUSY = 0.9
"""Share of a machine's cores in use from which a process that wants to run may have to wait."""
OTHERS_CORES = 0.5
"""Cores that processes outside the run take, and below, as a share of all: less is the noise of any machine."""
OTHERS_SHARE = 0.2
CHILDREN_CORES = 0.2
"""Cores that processes of environments take at least, and below, of those that the whole run uses."""
CHILDREN_SHARE = 0.5
QUEUED = 0.2
"""Share of the time in which a worker wants to run that it waits for a core."""
LOAD_FACTOR = 1.5
"""Load average against cores. The load also counts the head and short-lived processes."""
SPARE_LOAD = 2.0
"""Load that the head and its threads cause on top of the workers."""
WORKERS_FACTOR = 1.5
"""Busy workers per core from which more of them gain nothing."""

SILENT_S = 10.0
"""Nodes send a heartbeat every second."""

# -- link and weights --

LINK_SHARE = 0.4
"""Share of a fragment's time between request and arrival that was neither environment nor policy."""
LINK_S = 0.1
"""Shorter delays are those of the network code on a busy machine."""
SLOW_BYTES_PER_S = 20e6
"""A sixth of what gigabit Ethernet carries."""
STALE_LAG = 10
"""Versions behind: PPO and IMPALA-like learners correct for a few."""
STALE_LAG_MEASURED = 50
"""The same where the drift is measured and small, but weights were never pulled again."""
USUAL_FACTOR = 3.0
"""Lag against the usual number of versions between two pulls."""
UNPUBLISHED_FRAGMENTS = 20
"""A stream's learner that has had this many fragments, and as long as `WARM_S`, has usually made an update."""
HIGH_DRIFT = 0.05
"""Mean KL per state, if the rule has no threshold: it leaves about exp(-2 x 0.05) = 90 % effective samples."""

# -- the script --

LEARNER_SHARE = 0.6
"""Share of the samples outside of any call, with idle workers."""
LEARNER_S = 60.0
"""Outside of any call for this long without a sign of work for the workers."""
POLICY_SHARE = 0.7
POLICY_S = 0.0005
"""Time of the policy for one step of a worker's slots; a shorter one is not the network, but the call itself."""
LOCKSTEP_FACTOR = 2.0
"""The slowest worker against the median."""
LOCKSTEP_WAITING = 0.35
"""Mean share of the workers' time spent waiting."""
INVALID_SHARE = 0.01
OVERLAP = 0.2
"""Share of the learner's samples with busy workers from which collecting and learning overlap already."""
