"""The page of a run over real HTTP: who may read it, what it sends, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from clusterenv.errors import StartError
from clusterenv.monitor.page.assets import read_assets
from clusterenv.monitor.page.serve import start
from fake_source import HOSTILE, FakeSource
from page_elements import Elements

ROUTES = ["/", "/static/page.js", "/api/state", "/api/points", "/api/events", "/api/fragments", "/metrics", "/stream"]


@pytest.fixture
def source():
    return FakeSource(700)


@pytest.fixture
def served(source):
    page = start(source, hosts=["head.example"])
    yield page
    page.close()


def request(served, path, *, bearer=None, **headers):
    """Return status, headers and body."""
    if bearer is not None:
        headers["Authorization"] = f"Bearer {bearer}"
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def get(served, path, **headers):
    status, _, body = request(served, path, bearer=served.token, **headers)
    assert status == 200, body
    return body


class Stream:
    """The server-sent events of a page."""

    def __init__(self, served, **headers):
        self._connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
        self._connection.request("GET", "/stream", headers={"Authorization": f"Bearer {served.token}", **headers})
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        assert self._response.headers["Content-Type"].startswith("text/event-stream")

    def next(self):
        """Return the fields of the next event with its data read; None: the stream has ended."""
        fields = {}
        while line := self._response.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = json.loads(value) if name == "data" else value
        return fields or None

    def close(self):
        self._response.close()
        self._connection.close()


@contextlib.contextmanager
def streaming(served, **headers):
    stream = Stream(served, **headers)
    try:
        yield stream
    finally:
        stream.close()


# Who may read it.


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_is_served_without_the_token(served, path):
    status, _, body = request(served, path)
    assert (status, len(body) < 300) == (403, True)
    assert "token" in body


@pytest.mark.parametrize("token", ["", "x", "ä", "A" * 5000])
def test_a_wrong_token_is_refused_in_every_place(served, token):
    quoted = token.replace("ä", "%C3%A4")
    assert request(served, f"/?token={quoted}")[0] == 403
    assert request(served, "/", bearer=token.encode().decode("latin-1"))[0] == 403
    cookie = _cookie(served).split("=")[0]
    assert request(served, "/", Cookie=f"{cookie}={quoted}")[0] == 403


def _cookie(served):
    _, headers, _ = request(served, f"/?token={served.token}")
    return headers["Set-Cookie"].split(";")[0]


def test_the_url_sets_a_cookie_and_leads_to_one_without_the_token(served):
    status, headers, _ = request(served, served.url.partition(str(served.port))[2])
    assert status == 303
    assert headers["Location"] == "./"
    attributes = {part.strip().lower() for part in headers["Set-Cookie"].split(";")[1:]}
    assert {"httponly", "samesite=lax", "path=/"} <= attributes
    assert request(served, "/", Cookie=_cookie(served))[0] == 200


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/api/points?after=5&token={}", "./points?after=5"),
        ("/api/points?token={}&after=5", "./points?after=5"),
        ("//evil.example?token={}", "./evil.example"),
        ("/javascript:alert(1)?token={}", "./javascript%3Aalert%281%29"),
    ],
)
def test_the_redirect_keeps_the_query_and_stays_on_this_page(served, path, location):
    status, headers, _ = request(served, path.format(served.token))
    assert (status, headers["Location"]) == (303, location)


def test_pages_of_two_runs_do_not_share_their_cookie(source, served):
    other = start(source)
    try:
        both = "; ".join([_cookie(served), _cookie(other)])
        assert request(served, "/", Cookie=both)[0] == 200
        assert request(other, "/", Cookie=both)[0] == 200
        assert request(other, "/", Cookie=_cookie(served))[0] == 403
    finally:
        other.close()


@pytest.mark.parametrize("host", ["127.0.0.1:{}", "localhost:{}", "LOCALHOST", "[::1]:{}", "head.example:{}"])
def test_names_of_this_machine_are_accepted(served, host):
    assert request(served, "/", bearer=served.token, Host=host.format(served.port))[0] == 200


@pytest.mark.parametrize("host", ["evil.example:{}", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]", ""])
def test_a_foreign_name_is_refused_even_with_the_token(served, host):
    """A site whose name resolves to 127.0.0.1 would otherwise read the page in the user's browser."""
    status, _, body = request(served, "/", bearer=served.token, Host=host.format(served.port))
    assert status == 403
    assert "not served under the name" in body


def test_the_token_does_not_appear_in_representations(served):
    assert served.token not in repr(served)
    assert len(served.token) >= 32


# What it sends.


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/api/state", 200), ("/nowhere", 404), ("/metrics", 200)])
def test_every_answer_has_the_security_headers(served, path, status):
    for bearer, expected in ((served.token, status), ("wrong", 403)):
        got, headers, _ = request(served, path, bearer=bearer)
        assert got == expected
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_the_page_has_no_inline_script_and_loads_only_its_own_files(served):
    elements = Elements(get(served, "/"))
    assert not any(elements.texts("script") + elements.texts("style"))
    for tag, attributes, _ in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href"):
            if attributes.get(name, "data:,") != "data:,":
                assert get(served, f"/{attributes[name]}")


def test_scripts_write_texts_only_as_texts():
    scripts = {name: text for name, text in read_assets().items() if name.endswith(".js")}
    assert len(scripts) > 5
    for name, text in scripts.items():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "DOMParser",
        ):
            assert word not in text, f"{name}: {word}"


@pytest.mark.parametrize("name", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "nothing.js", ""])
def test_only_the_files_of_the_page_are_served(served, name):
    assert request(served, f"/static/{name}", bearer=served.token)[0] == 404


def test_the_api_gives_the_sources_data(source, served):
    state = json.loads(get(served, "/api/state"))
    assert state["info"]["name"] == "lander-aps"
    assert state["sample"]["point"]["steps"] == source.sample().point.steps
    points = source.points()
    assert len(json.loads(get(served, "/api/points"))) == len(points)
    later = json.loads(get(served, f"/api/points?after={points[-3].time_s!r}"))
    assert [point["time_s"] for point in later] == [point.time_s for point in points[-2:]]
    assert json.loads(get(served, "/api/events?after=2"))[0]["number"] == 3
    arrived = source.fragments()[-5].arrived_at
    assert len(json.loads(get(served, f"/api/fragments?after={arrived!r}"))) == 4


def test_a_cursor_that_is_no_number_is_the_callers_mistake(served):
    for path in ("/api/points?after=x", "/api/events?after=1.5", "/api/fragments?after="):
        assert request(served, path, bearer=served.token)[0] == 400


def test_texts_of_environments_are_json_not_html(served):
    _, headers, body = request(served, "/api/events", bearer=served.token)
    assert headers["Content-Type"] == "application/json"
    assert any(HOSTILE in event["detail"] for event in json.loads(body))


def test_prometheus_reads_the_metrics(source, served):
    _, headers, body = request(served, "/metrics", bearer=served.token)
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert families["clusterenv_steps"].samples[0].value == source.sample().point.steps


# The stream.


def test_the_first_message_has_the_history_and_later_ones_what_is_new(source, served):
    with streaming(served) as stream:
        first = stream.next()["data"]
        assert first["info"]["env"] == "LunarLander-v3"
        assert len(first["points"]) == 700
        assert len(first["events"]) == len(source.events())
        source.add_event("slow", "now")
        source.advance()
        second = stream.next()["data"]
        assert [point["steps"] for point in second["points"]] == [source.sample().point.steps]
        assert [event["reason"] for event in second["events"]] == ["now"]
        assert all(fragment["arrived_at"] > first["fragments"][-1]["arrived_at"] for fragment in second["fragments"])


def test_a_page_that_connects_again_gets_only_what_it_missed(source, served):
    with streaming(served) as stream:
        identity = stream.next()["id"]
    for _ in range(3):
        source.advance()
    with streaming(served, **{"Last-Event-ID": identity}) as stream:
        assert len(stream.next()["data"]["points"]) == 3
    with streaming(served, **{"Last-Event-ID": "what?"}) as stream:
        assert len(stream.next()["data"]["points"]) == 703


def test_a_run_without_a_sample_yet_is_shown_and_its_first_sample_follows():
    source = FakeSource(0)
    page = start(source)
    try:
        with streaming(page) as stream:
            assert stream.next()["data"]["sample"] is None
            source.advance()
            assert stream.next()["data"]["sample"]["point"]["time_s"] > 0
    finally:
        page.close()


def test_the_stream_ends_with_the_run(source, served):
    with streaming(served) as stream:
        stream.next()
        source.finish()
        while (message := stream.next()) and not message["data"]["sample"]["is_over"]:
            pass  # the last second may come before its end
        assert message is not None
        assert stream.next() is None


def test_a_run_that_cannot_be_read_any_more_is_said_so(source, served):
    with streaming(served) as stream:
        stream.next()
        source.sample = _fail
        message = stream.next()
        assert message["event"] == "unreachable"
        assert "the head is gone" in message["data"]["text"]
        assert stream.next() is None
    status, _, body = request(served, "/api/state", bearer=served.token)
    assert status == 503
    assert "the head is gone" in body


def _fail():
    raise ConnectionError("the head is gone")


def test_texts_that_are_no_utf8_do_not_end_the_stream(source, served):
    source.add_event("env_error", "file 'level-\udcff'", detail="\ud800")
    with streaming(served) as stream:
        assert stream.next()["data"]["events"][-1]["reason"] == "file 'level-\\udcff'"


# How it ends.


def test_closing_does_not_wait_for_viewers(source):
    threads = set(threading.enumerate())
    page = start(source)
    with streaming(page) as stream:
        stream.next()
        began = time.monotonic()
        page.close()
        assert time.monotonic() - began < 3
        assert stream.next() is None
    page.close()
    assert set(threading.enumerate()) == threads
    with socket.create_server(("127.0.0.1", page.port)):
        pass  # the port is free again


def test_closing_at_once_is_clean(source):
    for _ in range(5):
        start(source).close()


def test_a_source_that_hangs_does_not_hang_close(source, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("clusterenv.monitor.page.serve._JOIN_S", 0.3)
    page = start(source)

    def hang():
        released.wait()

    source.sample = hang
    with streaming(page):
        began = time.monotonic()
        page.close()
        assert time.monotonic() - began < 2
        released.set()


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartError, match="choose another"):
        start(FakeSource(1), port=taken.getsockname()[1])
