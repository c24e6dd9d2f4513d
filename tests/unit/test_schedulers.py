"""Decisions of `Command` and `Slurm(template=...)`: placeholders, what commands print, batch scripts."""

from __future__ import annotations

import re

import pytest

import clusterenv as ce
from clusterenv.backends.cluster import example_plan
from clusterenv.backends.command import submit_command
from clusterenv.backends.command_jobs import find_job_id, next_to_explain, parse_states, read_ledger, shorten
from clusterenv.backends.launch.placeholders import fill, fill_words
from clusterenv.backends.slurm_template import header_options
from clusterenv.cli import main

COMMANDS = {"submit": "sub {script}", "status": "list", "cancel": "del {jobs}"}


# -- placeholders -------------------------------------------------------------------------------------------------


def test_only_known_placeholders_are_filled():
    text = "echo {name} ${name} {other} {a,b} | awk '{print $1}'"
    assert fill(text, {"name": "run"}) == "echo run ${name} {other} {a,b} | awk '{print $1}'"


def test_several_jobs_are_words_of_their_own():
    words = ["del", "--of={name}", "{jobs}", "all: {jobs}"]
    assert fill_words(words, {"name": "x"}, {"jobs": ["1", "2"]}) == ["del", "--of=x", "1", "2", "all: 1 2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"submit": "sub {scirpt}"}, r"submit=\.\.\.\) has {scirpt}, which is no placeholder; did you mean {script}"),
        ({"submit": "sub 'a"}, "submit=.*expected a string or a list of words"),
        ({"submit": ""}, r"submit=\.\.\.\) is empty"),
        ({"submit": ["sub", "a\nb"]}, "line break"),
        ({"submit": "sub {job}"}, "{job}, which is not known there"),
        ({"cancel": "del"}, "cancel=.* names no job: write {jobs}"),
        ({"status": "list {job}"}, "it must list all jobs of the run at once"),
        ({"reason": "why"}, "reason=.* names no job: write {job}"),
        ({"job_id": "("}, r"job_id='\('\): expected a regular expression"),
        ({"status_line": r"(\d+)"}, "expected a group"),
        ({"poll_s": 0.0}, "above 0"),
        ({"end_signal": "usr 2"}, "name of a signal"),
        ({"python": ""}, "interpreter"),
        ({"env_vars": {"A": "b\nc"}}, "control character"),
        ({"env_vars": {"A B; touch /tmp/x": 1}}, r"Command\(env_vars=.*'A B; touch /tmp/x' is no name of a variable"),
        ({"env_vars": {"1A": 1}}, "'1A' is no name"),
        ({"nodes": 0}, "1 or more"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ce.SpecError, match=message):
        ce.Command(**{"nodes": 2, **COMMANDS, **options})


def test_names_of_variables_of_slurm():
    with pytest.raises(ce.SpecError, match=r"Slurm\(env_vars=.*'A=1;B' is no name of a variable"):
        ce.Slurm(2, env_vars={"A=1;B": 1})
    assert ce.Slurm(2, env_vars={"_a1": 1}).env_vars == {"_a1": 1}


# -- what schedulers print ----------------------------------------------------------------------------------------

# The first is from the Grid Engine of the tests; the others follow the formats of schedulers that are not here.
QSTAT = """
job-ID  prior   name       user         state submit/start at     queue                          slots ja-task-ID
-----------------------------------------------------------------------------------------------------------------
      1 0.50000 clusterenv root         dr    11/18/2026 07:16:40 all.q@vm                           2
      2 0.50000 clusterenv root         r     11/18/2026 07:16:40 all.q@vm                           2
      3 0.50000 clusterenv root         qw    11/18/2026 07:16:40                                    2
     44 0.25000 other      root         Eqw   11/18/2026 07:16:49                                    1
"""
PBS = """
Job id            Name             User              Time Use S Queue
----------------  ---------------- ----------------  -------- - -----
1.server          ce-abcdef01      me                00:00:01 R workq
2.server          ce-abcdef01      me                       0 Q workq
3.server          ce-abcdef01      me                00:00:01 F workq
"""
SAMPLES = [
    (ce.Command.sge, "3", "3", QSTAT, {"1": "dr", "2": "r", "3": "qw"}, "3"),
    (ce.Command.pbs, "3.server\n", "3", PBS, {"1": "R", "2": "Q", "3": "F"}, "2"),
    (
        ce.Command.lsf,
        "Job <3> is submitted to default queue <normal>.",
        "3",
        "1 RUN\n2 PEND\n3 EXIT\n",
        {"1": "RUN", "2": "PEND", "3": "EXIT"},
        "2",
    ),
    (
        ce.Command.htcondor,
        "3.0 - 3.0",
        "3",
        "1 R undefined\n2 I undefined\n3 H disk full\n",
        {"1": "R undefined", "2": "I undefined", "3": "H disk full"},
        "2",
    ),
]


@pytest.mark.parametrize(
    ("made", "answer", "job", "listed", "states", "waiting"), SAMPLES, ids=lambda v: getattr(v, "__name__", "")
)
def test_ready_made_commands(made, answer, job, listed, states, waiting):
    ours = made(2, workers_per_node=2, cpus_per_worker=3, options="-q 'long jobs'", folder="/keys")
    found = re.search(ours.job_id, answer)
    assert found is not None and (found[1] if found.re.groups else found[0]) == job
    assert parse_states(listed, ours.status_line, {"1", "2", "3"}) == states
    assert [job for job, state in states.items() if re.search(ours.is_pending, state)] == [waiting]
    words = submit_command(ours, example_plan(ours), 1)
    assert "long jobs" in words and any("/keys/clusterenv-RUN/node-1.sh" in word for word in words)
    assert not any("{" in word for word in words), words


@pytest.mark.parametrize(
    ("made", "over", "stuck"),
    [
        (ce.Command.sge, [], ["Eqw"]),
        (ce.Command.pbs, ["F", "C", "X"], ["H"]),
        (ce.Command.lsf, ["DONE", "EXIT"], ["PSUSP"]),
        (ce.Command.htcondor, ["C undefined", "X undefined"], ["H no disk"]),
    ],
)
def test_states_of_ready_made_commands(made, over, stuck):
    ours = made(1)
    assert all(re.search(ours.is_over, state) for state in over)
    assert all(re.search(ours.is_stuck, state) for state in stuck)
    for state in ("r", "R", "RUN", "dr", "t", "R undefined"):
        assert not re.search(ours.is_over or "$^", state) and not re.search(ours.is_stuck, state)
        assert not re.search(ours.is_pending, state)


def test_options_of_ready_made_commands_can_be_replaced():
    ours = ce.Command.sge(2, options="-pe smp {cores}", workers_per_node=8, status="qstat -u me", grace_s=60)
    assert ours.status == ("qstat", "-u", "me") and ours.grace_s == 60
    assert "-pe smp 8" in " ".join(submit_command(ours, example_plan(ours), 0))


@pytest.mark.parametrize(
    ("pattern", "job"),
    [(r"\d+", "12"), (r"<(\d+)>", "12"), (r"\d*", None), (r"(\d+)x|submitted", None), (r"Job <.*", None)],
)
def test_job_ids(pattern, job):
    assert find_job_id("Job <12> is submitted", pattern) == job


def test_damaged_lines_of_the_file_of_ids(tmp_path):
    path = tmp_path / "jobs.txt"
    assert read_ledger(path) == []
    path.write_text("0 12\n\n1\n1 \nx 3\n1 13\n0 1")
    assert read_ledger(path) == [(0, "12"), (1, "13")]


def test_a_line_without_a_state():
    assert parse_states("1\n2\n", r"(?P<job>\d+)", {"2"}) == {"2": ""}


def test_reasons_are_asked_for_in_turn():
    reasons = {"1": (100.0, "full"), "2": (90.0, "full")}
    assert next_to_explain(["1", "2", "3"], reasons, 101.0) == "3"
    assert next_to_explain(["1", "2"], reasons, 101.0) is None
    assert next_to_explain(["1", "2"], reasons, 125.0) == "2"
    assert next_to_explain([], reasons, 125.0) is None
    assert shorten("  a\n\n b " + "c" * 400).startswith("a; b ccc") and len(shorten("c" * 400)) == 300


# -- a site's own batch script ------------------------------------------------------------------------------------

TEMPLATE = """#!/bin/bash -l
#SBATCH -N 1 --account=proj  # of the site
#SBATCH -pcpu
#SBATCH --signal=B:TERM@90
# a comment

module load site
awk '{print $1}' ${name} > {log}.hosts
exec {command}
#SBATCH --qos=late
"""


def test_a_template_gets_the_command_and_the_options_that_it_lacks(tmp_path, capsys):
    path = tmp_path / "site.sh"
    path.write_text(TEMPLATE)
    options = ["folder=/keys", "python=python3", "wrap=apptainer exec x.sif", "mem=8G", "workers_per_node=4"]
    assert main(["script", "slurm", f"template={path}", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == TEMPLATE.splitlines()[:4]
    assert "#SBATCH --job-name=clusterenv-RUN" in lines[4:12] and "#SBATCH --output=/keys/logs/RUN/node-0.log" in lines
    assert "#SBATCH --ntasks=1" in lines and "#SBATCH --cpus-per-task=4" in lines and "#SBATCH --mem=8G" in lines
    assert not [line for line in lines if line.startswith(("#SBATCH --nodes", "#SBATCH --signal=B:TERM@30"))]
    agent = "python3 -m clusterenv node --join /keys/clusterenv-RUN/node-0.key --lease-s 300 --grace-s 90"
    assert lines[-5:] == [
        "",
        "module load site",
        "awk '{print $1}' ${name} > /keys/logs/RUN/node-0.log.hosts",
        f"exec apptainer exec x.sif {agent}",
        "#SBATCH --qos=late",
    ]


def test_options_in_a_header():
    found = header_options(TEMPLATE)
    assert found == {"nodes": "1", "account": "proj", "partition": "cpu", "signal": "B:TERM@90"}
    assert header_options("#!/bin/sh\n#SBATCH --exclusive --mem 8G -t=5\n") == {
        "exclusive": None,
        "mem": "8G",
        "time": "5",
    }


def test_text_is_a_template_too():
    ours = ce.Slurm(2, template="#!/bin/bash\nexec {command}\n")
    text = ours.script(example_plan(ours)).splitlines()
    assert text[0] == "#!/bin/bash" and text[1].startswith("#SBATCH --job-name=") and text[-1].startswith("exec ")


@pytest.mark.parametrize(
    "line",
    [
        "exec {command} # the node",
        'echo "a # b"; exec {command}',
        "echo 'a # b' && exec {command}",
        "test $# = 0 && exec {command}",
        "echo ${#name} a#b; exec {command}",
        r"echo \# it\'s; exec {command}",
    ],
)
def test_lines_that_start_the_node(line):
    ce.Slurm(2, template=f"#!/bin/bash\n{line}\n")


@pytest.mark.parametrize(
    ("signal", "seconds"), [("B:TERM@90", 90), ("SIGINT@45", 45), ("RB:2@10", 10), ("15", 60), ("b:term@7", 7)]
)
def test_signals_of_a_template(signal, seconds):
    ours = ce.Slurm(2, template=f"#!/bin/bash\n#SBATCH --signal={signal}\nexec {{command}}\n")
    assert ours.script(example_plan(ours)).endswith(f" --grace-s {seconds}\n")


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("no-such-file.sh", {}, "no-such-file.sh.*expected the text of a batch script, or a file"),
        ("exec {command}\n", {}, "begins with its interpreter"),
        ("#!/bin/bash\n# exec {command}\n", {}, "does not start the node: write `exec {command}`"),
        ("#!/bin/bash\nexec ${command}\n", {}, "does not start the node.*`\\${command}` is a variable of the shell"),
        ("#!/bin/bash\necho hi # exec {command}\n", {}, "does not start the node"),
        ('#!/bin/bash\necho \'a\' "b\\" # c";# {command}\n', {}, "does not start the node"),
        (
            "#!/bin/bash\n#SBATCH --signal=B:USR1@60\nexec {command}\n",
            {},
            "--signal=B:USR1@60: nodes.* --signal=B:TERM@60",
        ),
        ("#!/bin/bash\n#SBATCH --signal USR2\nexec {command}\n", {}, "--signal=USR2: nodes leave on TERM and INT"),
        ("#!/bin/bash\nexec {comand}\n", {}, "did you mean {command}"),
        ("#!/bin/bash\n#SBATCH -J mine\nexec {command}\n", {}, "sets --job-name: leave it out, jobs are named"),
        ("#!/bin/bash\n#SBATCH -o out\nexec {command}\n", {}, "sets --output"),
        ("#!/bin/bash\n#SBATCH --nodes=4\nexec {command}\n", {}, "--nodes=4: each node is a job of its own"),
        ("#!/bin/bash\n#SBATCH -p cpu\nexec {command}\n", {"partition": "gpu"}, "--partition is in the template and"),
        ("#!/bin/bash\n#SBATCH --comment='a\nexec {command}\n", {}, "cannot be read"),
        (TEMPLATE, {"setup": ["module load x"]}, "write those lines in the template"),
        (TEMPLATE, {"env_vars": {"A": 1}}, "write those lines in the template"),
        (TEMPLATE, {"mode": "srun"}, "for jobs that are submitted"),
    ],
)
def test_bad_templates(template, options, message):
    with pytest.raises(ce.SpecError, match=message):
        ce.Slurm(2, template=template, **options)
