"""The page of a run as one file, and the data in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import msgspec
import pytest

from clusterenv.monitor.encoding import to_json
from clusterenv.monitor.page.assets import HTML, read_assets
from clusterenv.monitor.page.data import Cursor, Updates, thin
from clusterenv.monitor.page.report import write_report
from clusterenv.monitor.sample import Point
from fake_source import HOSTILE, FakeSource
from page_elements import Elements


@pytest.fixture
def source():
    return FakeSource(700)


def _fail():
    raise ConnectionError("the head is gone")


def test_the_report_is_one_file_without_references(source, tmp_path):
    path = write_report(source, tmp_path / "run.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.html"]
    elements = Elements(path.read_text())
    for tag, attributes, _ in elements.found:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,"
    assert "http:" not in re.sub(r"http://www\.w3\.org/2000/svg", "", path.read_text())
    assert "https:" not in path.read_text()
    assert "url(" not in "".join(elements.texts("style"))


def test_the_report_has_the_data_and_texts_cannot_leave_it(source, tmp_path):
    text = write_report(source, tmp_path / "run.html").read_text()
    elements = Elements(text)
    (data,) = [body for _, attributes, [body] in _scripts(elements) if attributes.get("id") == "data"]
    assert "<" not in data
    found = json.loads(data)
    assert any(HOSTILE in event["detail"] for event in found["events"])
    assert len(found["points"]) == 700
    names = re.findall(r'<script src="static/', read_assets()[HTML])
    assert len(_scripts(elements)) == len(names) + 1
    assert "img" not in {tag for tag, _, _ in elements.found}


def _scripts(elements):
    return [entry for entry in elements.found if entry[0] == "script"]


def test_the_reports_policy_allows_exactly_its_scripts(source, tmp_path):
    elements = Elements(write_report(source, tmp_path / "run.html").read_text())
    (policy,) = [
        attributes["content"]
        for tag, attributes, _ in elements.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    scripts = ["".join(body) for _, attributes, body in _scripts(elements) if "id" not in attributes]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert re.search(r"script-src ([^;]*);", policy)[1] == " ".join(f"'sha256-{one}'" for one in hashes)
    assert "unsafe" not in policy


def test_a_report_replaces_the_old_one_and_a_failed_one_does_not(source, tmp_path):
    path = tmp_path / "run.html"
    write_report(source, str(path))
    before = path.read_text()
    source.points = lambda after_s: _fail()
    with pytest.raises(ConnectionError):
        write_report(source, path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


# What is sent of a long history.


def test_a_long_history_is_thinned_and_its_newest_points_are_kept():
    points = [Point(time_s=float(i), steps=100 * i, steps_per_s=100.0 + i % 2, waiting=0.25) for i in range(50_000)]
    thinned = thin(points, 2000)
    assert 1500 < len(thinned) <= 2000
    assert thinned[-1000:] == points[-1000:]
    assert thinned[0].steps_per_s == pytest.approx(100.5, abs=0.05)
    assert thinned[0].waiting == 0.25
    times = [point.time_s for point in thinned]
    assert times == sorted(set(times))
    assert thin(points[:2000], 2000) == points[:2000]


def test_a_cursor_survives_being_written():
    for cursor in (Cursor(), Cursor(1_790_000_000.123456, 17, 1_790_000_000.9999999)):
        assert Cursor.parse(str(cursor)) == cursor
    for text in ("", "1,2", "a,b,c", "1,2,3,4"):
        assert Cursor.parse(text) == Cursor()


def test_numbers_that_json_lacks_are_null():
    assert msgspec.json.decode(to_json({"a": float("nan"), "b": float("inf")})) == {"a": None, "b": None}


def test_updates_are_read_once(source):
    updates = Updates(source)
    assert updates.read() is not None
    assert updates.read() is None
    source.finish()
    assert updates.read().sample.is_over
