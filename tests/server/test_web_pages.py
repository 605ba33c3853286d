"""The pages as HTTP sees them: what they are made of, who gets them, what the view of the engine
tells and what it hides.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import martlet.server
from martlet.server.live_view import MAX_VIEWERS
from martlet.toy import spell
from tests.server.serving import Served, serving, wait_until
from tests.server.test_server_models import Loader

STATIC = Path(martlet.server.__file__).parent / "static"
FILES = sorted(STATIC.iterdir())


class Viewer:
    """Reads the frames of /engine/events."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self._lines = response.iter_lines()

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event: its name and its data."""
        name = ""
        for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))
        raise EOFError

    def frame_where(self, wanted: Any) -> dict[str, Any]:
        """The first frame that is as wanted."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            name, data = self.next()
            if name == "frame" and wanted(data):
                return data
        raise AssertionError("no such frame has come")


@contextmanager
def viewing(served: Served, **headers: str) -> Iterator[Viewer]:
    with served.http.stream("GET", "/engine/events", headers=headers) as response:
        yield Viewer(response)


def watched(served: Served) -> int:
    return len(served.service.built.engine._recorder._observers)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("abc"), prefix_cache=True) as server:
        yield server


# -- files -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/", "/engine"])
def test_a_page_and_all_that_it_names_is_served(served: Served, path: str) -> None:
    page = served.http.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
    assert len(named) >= 4
    for name in named:
        found = served.http.get(name)
        assert found.status_code == 200
        assert found.content
        assert found.headers["x-content-type-options"] == "nosniff"
    for name in re.findall(r'from "\./([a-z]+\.js)"', "".join(file.read_text() for file in STATIC.glob("*.js"))):
        assert served.http.get(f"/static/{name}").headers["content-type"].startswith("text/javascript")


def test_policy_allows_nothing_but_this_server(served: Served) -> None:
    for path in ("/", "/engine", "/static/chat.js"):
        policy = served.http.get(path).headers["content-security-policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == rules["img-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in policy


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_asks_no_other_host_and_parses_no_markup(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    allowed = ("http://www.w3.org/2000/svg", "https://html.spec.whatwg.org", "https://spec.commonmark.org")
    for address in re.findall(r"https?://[\w.-]+[^\s\"')]*", text):
        assert address.startswith(allowed), address
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=", text)
    if path.suffix in (".js", ".css", ".html"):
        assert len(text.splitlines()) <= 400


def test_files_are_asked_for_again_and_sent_once(served: Served) -> None:
    first = served.http.get("/static/chat.js")
    assert first.headers["cache-control"] == "no-cache"
    again = served.http.get("/static/chat.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert served.http.get("/static/chat.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2fweb.py", "%2e%2e/web.py", "../web.py", "..", "", "chat.js/"])
def test_no_other_file_can_be_had(served: Served, name: str) -> None:
    with served.connect() as connection:  # a client of ours would clean the path up
        connection.sendall(f"GET /static/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split(b" ")[1] in (b"404", b"307")
    assert b"import asyncio" not in answer


def test_pages_can_be_left_out() -> None:
    with serving(spell("abc"), web=False) as bare:
        for path in ("/", "/engine", "/engine/events", "/static/chat.js"):
            assert bare.http.get(path).status_code == 404


def test_pages_are_not_in_the_description_of_the_api(served: Served) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    assert not {"/", "/engine", "/engine/events"} & set(paths)


def test_pages_need_no_key_but_what_they_show_does() -> None:
    with serving(spell("abc"), api_keys=("the-key",)) as keyed:
        for path in ("/", "/engine", "/static/chat.js", "/static/icon.svg"):
            assert keyed.http.get(path).status_code == 200
        for path in ("/engine/events", "/engine/", "/v1/models", "/static/../metrics"):
            assert keyed.http.get(path).status_code == 401
        with viewing(keyed, Authorization="Bearer the-key") as viewer:
            assert viewer.next()[0] == "hello"


# -- the view of the engine ------------------------------------------------------------------------
def test_a_view_tells_pages_prefixes_queue_and_steps() -> None:
    """Six requests of one prompt, of which four run at a time, each step four decoding or some of a
    prompt.
    """
    with serving(spell("x" * 40), step_s=0.02, prefix_cache=True) as served, viewing(served) as viewer:
        name, hello = viewer.next()
        assert name == "hello"
        assert viewer.headers["content-type"].startswith("text/event-stream")
        assert (hello["n_pages"], hello["page_tokens"], hello["max_seqs"]) == (512, 4, 4)
        first = viewer.frame_where(lambda frame: True)
        assert first["pages"]["cells"] == "f" * 512
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(served.chat, "the same question " * 3, max_tokens=30) for _ in range(6)]
            full = viewer.frame_where(lambda frame: frame["n_waiting"] == 2 and len(frame["running"]) == 4)
            assert all(future.result().status_code == 200 for future in asked)
        seen = {seq["name"] for seq in (*full["running"], *full["waiting"])}
        assert seen == {"1", "2", "3", "4", "5", "6"}
        counts = full["pages"]["counts"]
        assert sum(counts.values()) == 512
        assert len(full["pages"]["whose"]) == full["pages"]["cells"].count("o") == counts["o"]
        assert set(full["pages"]["whose"]) <= {seq["name"] for seq in full["running"]}
        last = viewer.frame_where(lambda frame: frame["totals"]["finished"] == 6)
        # 54 characters, and "u:", ";", "a:" of the template: 59 tokens, of which all full pages are
        # kept.
        assert last["running"] == last["waiting"] == []
        assert last["totals"]["prompt"] == 6 * 59
        assert last["totals"]["generated"] == 6 * 30
        assert last["pages"]["counts"]["c"] == last["tree"]["n_pages"] == last["tree"]["stretches"][0]["pages"]
        assert last["tree"]["stretches"][0]["users"] == []
        assert sum(last["ttft"]) == 6
        assert sum(last["itl"]) == 6 * 29


def test_steps_of_a_view_are_those_that_were_run() -> None:
    with serving(spell("abc"), step_s=0.01) as served, viewing(served) as viewer:
        viewer.next()
        viewer.frame_where(lambda frame: True)
        # 25, "u:", ";", "a:": 30 tokens, at most 16 a step
        served.chat("a question of many tokens")
        steps: list[Any] = []
        while sum(span[3] for step in steps for span in step["spans"]) < 3:
            steps += viewer.frame_where(lambda frame: frame["steps"])["steps"]
        assert [span[:3] for step in steps for span in step["spans"]] == [
            ["1", 0, 16], ["1", 16, 14], ["1", 30, 1], ["1", 31, 1], ["1", 32, 1]
        ]  # fmt: skip
        assert [step["tokens"] for step in steps] == [16, 14, 1, 1, 1]
        assert [step["step"] for step in steps] == sorted({step["step"] for step in steps})
        assert all(step["ms"][1] >= 10 for step in steps)


@pytest.mark.parametrize("with_text", [False, True])
def test_a_view_shows_text_only_if_told_to(with_text: bool) -> None:
    with serving(spell("x" * 60), step_s=0.02, prefix_cache=True, view_text=with_text) as served:
        with viewing(served) as viewer, ThreadPoolExecutor(1) as pool:
            fields = {"cache_salt": "mrs-miller", "user": "mr-miller", "max_tokens": 60}
            headers = {"X-Request-Id": "id-of-hers"}
            body = {"messages": [{"role": "user", "content": "the secret question"}], **fields}
            asked = pool.submit(served.post, "/v1/chat/completions", body, headers=headers)
            frame = viewer.frame_where(lambda frame: frame["running"] and frame["tree"]["stretches"])
            asked.result()
        said = json.dumps(frame)
        assert ("secret" in said) == with_text
        for hidden in ("mrs-miller", "mr-miller", "id-of-hers"):
            assert hidden not in said
        assert frame["tree"]["stretches"][0]["salt"] == 1


def test_nobody_looks_and_nothing_is_kept() -> None:
    with serving(spell("abc")) as served:
        before = watched(served)
        served.chat()
        with viewing(served) as viewer:
            viewer.next()
            assert watched(served) == before + 1
            with viewing(served) as other:
                other.next()
                assert watched(served) == before + 1
                assert served.service.view.n_viewers == 2
        wait_until(lambda: served.service.view.n_viewers == 0)
        assert watched(served) == before
        assert served.service.view._sampler is not None
        wait_until(lambda: served.service.view._sampler.done())  # type: ignore[union-attr]
        served.chat()
        assert not served.service.view._steps.records
        served.check_idle()


def test_an_idle_engine_is_left_alone() -> None:
    """A look would wake its thread."""
    with serving(spell("abc"), keep_alive_s=0.1) as served, viewing(served) as viewer:
        viewer.next()
        viewer.frame_where(lambda frame: True)
        looks = []
        call = served.service.bridge.call
        served.service.bridge.call = lambda job: looks.append(job) or call(job)  # type: ignore[func-returns-value,method-assign]
        time.sleep(0.8)
        assert looks == []
        served.chat()
        viewer.frame_where(lambda frame: frame["totals"]["finished"] == 1)
        assert 1 <= len(looks) <= 4


def test_a_viewer_that_does_not_read_delays_nobody() -> None:
    with serving(spell("x" * 100), send_timeout_s=0.3, prefix_cache=True, n_pages=4096) as served:
        with served.connect() as connection:
            connection.sendall(b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: served.service.view.n_viewers == 1)
            for _ in range(5):
                assert served.chat("many tokens " * 10, max_tokens=60).status_code == 200
            with viewing(served) as viewer:
                assert viewer.next()[0] == "hello"
                assert viewer.frame_where(lambda frame: frame["totals"]["finished"] == 5)
        wait_until(lambda: served.service.view.n_viewers == 0)
        served.check_idle()


def test_viewers_are_bounded() -> None:
    with serving(spell("abc")) as served:
        connections = [served.connect() for _ in range(MAX_VIEWERS)]
        for connection in connections:
            connection.sendall(b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: served.service.view.n_viewers == MAX_VIEWERS)
        refused = served.http.get("/engine/events")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_viewers"
        assert refused.headers["retry-after"] == "5"
        for connection in connections:
            connection.close()
        wait_until(lambda: served.service.view.n_viewers == 0)


def test_the_end_of_the_server_ends_the_views() -> None:
    """They would never end by themselves, and the server waits for what is open."""
    with serving(spell("abc"), shutdown_timeout_s=10) as served:
        connection = served.connect()
        connection.sendall(b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: served.service.view.n_viewers == 1)
        start = time.monotonic()
    assert time.monotonic() - start < 5
    data = b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.endswith(b"0\r\n\r\n")  # the body's proper end
    connection.close()


def test_a_step_that_fails_leaves_the_view() -> None:
    with serving(spell("abc"), prefix_cache=True) as served, viewing(served) as viewer:
        viewer.next()
        served.executor.fail = lambda plan: True
        assert served.chat().status_code == 500
        served.executor.fail = lambda plan: False
        assert served.chat().status_code == 200
        frame = viewer.frame_where(lambda frame: frame["totals"]["finished"] == 1)
        assert frame["totals"]["failed"] == 1
        assert frame["pages"]["counts"]["h"] == 0


def test_a_view_of_each_model_that_is_there() -> None:
    """Looking neither loads a model nor keeps it: the view of one that is closed for another
    ends.
    """
    there: set[str] = set()
    loaders = {name: Loader(name.upper(), there) for name in ("one", "two")}
    with serving(spell("FIRST"), more=dict(loaders), max_loaded_models=2) as served:
        assert served.http.get("/engine/events?model=one").status_code == 503
        assert served.http.get("/engine/events?model=three").status_code == 404
        served.chat(model="one")
        with served.http.stream("GET", "/engine/events?model=one") as response:
            viewer = Viewer(response)
            assert viewer.next()[1]["model"] == "one"
            viewer.frame_where(lambda frame: frame["totals"]["finished"] == 1)
            assert served.chat(model="two").status_code == 200
            assert loaders["two"].loads == 1
            with pytest.raises(EOFError):
                viewer.frame_where(lambda frame: False)
        with viewing(served) as viewer:
            assert viewer.next()[1]["model"] == "scripted"
