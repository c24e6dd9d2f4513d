"""Say why a run or one of its workers is slow, stale or dead, and whether this machine can run ClusterEnv.

`check_machine` and `diagnose_run` look; `diagnose` decides, and is pure; `as_json` and `print_report` show both.
"""

from clusterenv.monitor.doctor.checks import Check, Status
from clusterenv.monitor.doctor.diagnose import concerning, diagnose
from clusterenv.monitor.doctor.findings import Cause, Finding, Severity, Subject
from clusterenv.monitor.doctor.machine import check_machine
from clusterenv.monitor.doctor.show import as_json, print_report
from clusterenv.monitor.doctor.watch import diagnose_run

__all__ = [
    "Cause",
    "Check",
    "Finding",
    "Severity",
    "Status",
    "Subject",
    "as_json",
    "check_machine",
    "concerning",
    "diagnose",
    "diagnose_run",
    "print_report",
]
