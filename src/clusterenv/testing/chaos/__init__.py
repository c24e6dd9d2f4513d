"""Chaos for real runs: seeded faults, and a ledger that proves that no transition is lost without being declared.

`numbered` makes environments that number their transitions. `plan_faults` draws faults, an `Injector` applies them to
workers, nodes and links, and a `Ledger` checks each row that the learner gets against the expected number. Linux only.
"""

from clusterenv.testing.chaos.faults import ENVIRONMENT, LINK, NETWORK, NODE, WORKER, Fault, Kind, plan_faults
from clusterenv.testing.chaos.injector import Injector
from clusterenv.testing.chaos.ledger import Balance, Ledger, LedgerError
from clusterenv.testing.chaos.links import LinkedLoopback, divert, link_acts
from clusterenv.testing.chaos.machine import Clock, disk_acts
from clusterenv.testing.chaos.numbered import ACTIONS, Numbered, Trouble, ask, logits, numbered
from clusterenv.testing.chaos.proxy import Proxy
from clusterenv.testing.chaos.strangers import stranger_acts

__all__ = [
    "ACTIONS",
    "ENVIRONMENT",
    "LINK",
    "NETWORK",
    "NODE",
    "WORKER",
    "Balance",
    "Clock",
    "Fault",
    "Injector",
    "Kind",
    "Ledger",
    "LedgerError",
    "LinkedLoopback",
    "Numbered",
    "Proxy",
    "Trouble",
    "ask",
    "disk_acts",
    "divert",
    "link_acts",
    "logits",
    "numbered",
    "plan_faults",
    "stranger_acts",
]
