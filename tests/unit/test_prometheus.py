"""The metrics of a run are valid Prometheus text, whatever names hosts and environments have."""

from __future__ import annotations

import math

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from clusterenv.monitor.prometheus import render
from clusterenv.monitor.sample import NodeSample
from fake_source import SLOTS, FakeSource


def parse(text):
    """Return name → {labels: value}, and name → type."""
    values, types = {}, {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            types[sample.name] = family.type
            labels = frozenset(sample.labels.items())
            assert labels not in values.setdefault(sample.name, {}), f"{sample.name} twice"
            values[sample.name][labels] = sample.value
    return values, types


@pytest.fixture
def source():
    return FakeSource(300)


def only(values, name, **labels):
    return values[f"clusterenv_{name}"][frozenset(labels.items())]


def test_the_numbers_of_the_sample_are_there(source):
    sample = source.sample()
    values, _ = parse(render(source.info(), sample))
    assert only(values, "steps_total") == sample.point.steps > 0
    assert only(values, "time_share", part="waiting") == pytest.approx(sample.point.waiting)
    assert only(values, "events_total", kind="env_error") == 1
    assert only(values, "node_joined", node="3") == 1
    assert only(values, "node_fragments_total", node="0", lag="1") == sample.nodes[0].lags[1]
    assert only(values, "workers", state="running") == 48
    assert only(values, "slot_step_seconds", quantile="1") == max(sample.step_s)
    assert only(values, "envs") == SLOTS


def test_counters_and_only_they_are_named_total(source):
    _, types = parse(render(source.info(), source.sample()))
    assert {kind for name, kind in types.items() if name.endswith("_total")} == {"counter"}
    assert {kind for name, kind in types.items() if not name.endswith("_total")} == {"gauge"}


def test_every_name_has_its_help_and_type_once_and_in_front(source):
    lines = render(source.info(), source.sample()).splitlines()
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert helped == typed
    assert len(set(helped)) == len(helped)
    current = ""
    for line in lines:
        if line.startswith("#"):
            current = line.split()[2]
        else:
            assert line.split("{")[0].split()[0] == current


def test_before_the_first_sample_only_the_run_is_described(source):
    values, _ = parse(render(source.info(), None))
    assert set(values) == {"clusterenv_run_info", "clusterenv_start_time_seconds", "clusterenv_envs"}


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", 'x"} 1\nevil_total{a="', "ä → β", "\\n", ""])
def test_label_values_are_escaped(source, name):
    info = msgspec.structs.replace(source.info(), env=name)
    sample = msgspec.structs.replace(source.sample(), nodes=[NodeSample(0, "joined", host_name=name)])
    values, _ = parse(render(info, sample))
    (labels,) = values["clusterenv_run_info"]
    assert dict(labels)["env"] == name
    assert "evil_total" not in values


def test_bytes_that_are_no_text_can_be_written(source):
    info = msgspec.structs.replace(source.info(), env="env-\udcff")
    render(info, None).encode()


def test_unknown_values_have_no_line_and_odd_numbers_are_written_as_prometheus_does(source):
    sample = source.sample()
    point = msgspec.structs.replace(sample.point, drift=None, episode_return=math.nan, episode_length=math.inf)
    values, _ = parse(render(source.info(), msgspec.structs.replace(sample, point=point)))
    assert "clusterenv_drift" not in values
    assert math.isnan(only(values, "episode_return"))
    assert only(values, "episode_length") == math.inf
