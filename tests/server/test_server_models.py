"""Several models in one server: each loaded when it is asked for, the one idle for longest closed
for another (asks row 36).
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from martlet.cli import main
from martlet.commands.serve import _models
from martlet.config import resolve_config
from martlet.engine.build import Built
from martlet.errors import CapacityError, FormatError
from martlet.server.settings import ServerSettings
from martlet.toy import scripted_built, spell
from tests.server.serving import serving, wait_until


class Loader:
    """Loads a scripted model, and counts how often and what is there."""

    def __init__(self, answer: str, there: set[str], most: int = 9, seconds: float = 0.0) -> None:
        self.answer, self.there, self.most, self.seconds = answer, there, most, seconds
        self.loads = 0

    def __call__(self, lora: object = None) -> Built:
        time.sleep(self.seconds)
        if len(self.there) >= self.most:
            raise CapacityError("The model needs 9 GiB, and there are 5: use a smaller one.")
        self.loads += 1
        config = resolve_config({"model": self.answer, "backend": "null", "max_seqs": 4, "max_context": 256})
        built = scripted_built(config, spell(self.answer), context=256, n_pages=512)
        self.there.add(self.answer)
        built.resources.callback(self.there.discard, self.answer)
        return built


def text_of(served: object, model: str | None) -> str:
    reply = served.chat(model=model, max_tokens=8)  # type: ignore[attr-defined]
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == (model or "scripted")
    return str(reply.json()["choices"][0]["message"]["content"])


def test_each_name_has_its_model() -> None:
    there: set[str] = set()
    loaders = {name: Loader(name.upper(), there) for name in ("one", "two")}
    with serving(spell("FIRST"), more=dict(loaders)) as served:
        listed = served.http.get("/v1/models").json()["data"]
        assert [(entry["id"], entry["loaded"]) for entry in listed] == [
            ("scripted", True),
            ("one", False),
            ("two", False),
        ]
        assert text_of(served, None) == text_of(served, "scripted") == "FIRST"
        assert (loaders["one"].loads, loaders["two"].loads) == (0, 0)
        assert text_of(served, "two") == text_of(served, "two") == "TWO"
        assert text_of(served, "one") == "ONE"
        assert (loaders["one"].loads, loaders["two"].loads) == (1, 1)
        assert all(entry["loaded"] for entry in served.http.get("/v1/models").json()["data"])
        assert served.http.get("/v1/models/two").json()["id"] == "two"
        assert served.post("/tokenize", {"model": "two", "prompt": "ab"}).json()["tokens"] == [97, 98]
        for label, count in (("scripted", 2), ("one", 1), ("two", 2)):
            assert served.gauge("request_success_total", model_name=label) == count
        assert served.http.get("/ready?deep=1").json()["ready"]
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
            refused = served.post(path, {"model": "three", **body})
            assert refused.status_code == 404
            assert "'one'" in refused.json()["error"]["message"]
        assert served.http.get("/v1/models/three").status_code == 404
        served.check_idle()
    assert there == set()  # closed with the server


def test_a_model_by_the_name_that_was_given() -> None:
    """A name of the catalogue becomes a file's; requests may say either."""
    loaders = {"one": Loader("ONE", set())}
    with serving(spell("FIRST"), more=dict(loaders), model_given="smollm2-135m") as served:
        reply = served.chat(model="smollm2-135m").json()
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("scripted", "FIRST")
        assert text_of(served, "scripted") == "FIRST"
        assert text_of(served, "one") == "ONE"
        for path, body in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                           ("/tokenize", {"prompt": "ab"})):  # fmt: skip
            assert served.post(path, {"model": "smollm2-135m", **body}).status_code == 200
            assert served.post(path, {"model": "smollm2", **body}).status_code == 404


def test_one_at_a_time() -> None:
    """The one that was used longest ago makes room; the first is loaded again when it is asked
    for.
    """
    there: set[str] = set()
    loaders = {name: Loader(name.upper(), there) for name in ("scripted", "one", "two")}
    with serving(spell("FIRST"), more=dict(loaders), max_loaded_models=2) as served:
        assert text_of(served, "one") == "ONE"
        assert text_of(served, "two") == "TWO"  # the first had to go
        assert text_of(served, "one") == "ONE"
        assert loaders["scripted"].loads == 0
        assert text_of(served, None) == "SCRIPTED"  # and two for it
        assert there == {"ONE", "SCRIPTED"}
        assert [loaders[name].loads for name in ("scripted", "one", "two")] == [1, 1, 1]


def test_counters_never_go_back() -> None:
    """A model that is closed and loaded again goes on counting; while it is closed its totals
    stay.
    """
    loaders = {name: Loader(name.upper(), set()) for name in ("scripted", "one")}
    with serving(spell("FIRST"), more=dict(loaders), max_loaded_models=1) as served:

        def counted() -> dict[str, float]:
            text = served.http.get("/metrics").text
            lines = [line for line in text.splitlines() if 'model_name="scripted"' in line and "_created" not in line]
            kinds = ("_total{", "_total,", "_bucket{", "_count{", "_sum{")
            found = (line.rsplit(" ", 1) for line in lines if any(kind in line for kind in kinds))
            return {name: float(value) for name, value in found}

        before: dict[str, float] = {}
        for number, name in enumerate(["scripted", "one", "scripted", "one", "scripted"]):
            text_of(served, name)
            now = counted()
            assert before.keys() <= now.keys()
            assert [series for series, value in before.items() if now[series] < value] == []
            before = now
            times = number // 2 + 1
            assert served.gauge("request_success_total", model_name="scripted") == times
            assert served.gauge("generation_tokens_total", model_name="scripted") == 6 + 8 * (times - 1)
            assert served.gauge("time_to_first_token_seconds_count", model_name="scripted") == times


def test_memory_decides() -> None:
    """CapacityError from the memory plan closes the idle ones until the model fits."""
    there: set[str] = set()
    loaders = {name: Loader(name.upper(), there, most=1) for name in ("one", "two")}
    with serving(spell("FIRST"), more=dict(loaders)) as served:
        assert text_of(served, "one") == "ONE"
        assert text_of(served, "two") == "TWO"
        assert there == {"TWO"}
        assert text_of(served, None) == "FIRST"  # how it is loaded is not known, so it stays


def test_who_answers_is_not_closed() -> None:
    """A model that streams keeps its place; the other request is told so, and when to come
    again.
    """
    there: set[str] = set()
    loaders = {name: Loader(name.upper(), there) for name in ("scripted", "one")}
    with serving(spell("x" * 200), step_s=0.02, more=dict(loaders), max_loaded_models=1) as served:
        with served.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 200, "stream": True}
        ) as stream:
            next(stream.iter_lines())
            refused = served.chat(model="one")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert loaders["one"].loads == 0
        wait_until(lambda: served.chat(model="one", max_tokens=8).status_code == 200)


def test_many_ask_for_a_model_that_is_not_there() -> None:
    """They wait for one load, and the model that is there goes on meanwhile."""
    loader = Loader("ONE", set(), seconds=0.3)
    with serving(spell("FIRST"), more={"one": loader}) as served, ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(text_of, served, "one") for _ in range(5)]
        start = time.monotonic()
        assert text_of(served, None) == "FIRST"
        assert time.monotonic() - start < 0.25
        assert {done.result() for done in waiting} == {"ONE"}
        assert loader.loads == 1


def test_a_model_that_does_not_load() -> None:
    """Its error reaches the client, and the others are as before."""

    def broken(lora: object) -> Built:
        raise FormatError("one.gguf", "is cut")

    with serving(spell("FIRST"), more={"one": broken}) as served:
        refused = served.chat(model="one")
        assert refused.status_code == 500
        assert "is cut" in refused.json()["error"]["message"]
        served.check_idle()


def test_closing_frees_threads() -> None:
    """Ten changes of model leave no thread behind."""
    loaders: dict[str, Callable[[], Built]] = {name: Loader(name.upper(), set()) for name in ("scripted", "one")}
    with serving(spell("FIRST"), more=loaders, max_loaded_models=1) as served:
        text_of(served, "one")
        before = threading.active_count()
        for _ in range(5):
            text_of(served, "scripted")
            text_of(served, "one")
        assert threading.active_count() <= before + 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "serve needs a model"),
        (["--model", "name"], "NAME=PATH"),
        (["--model", "a=x.gguf", "--model-name", "b"], "--model-name"),
        (["--model", "a={file}", "--model", "a={file}"], "Two models have the name 'a'"),
        (["{file}", "--lora", "sql"], "expected NAME=PATH"),
        (
            ["--model", "a={file}", "--model", "b={file}", "--lora", "sql=x"],
            "--lora sql=x does not say for which model",
        ),
        (["--model", "a={file}", "--model", "b={file}", "--lora", "sql@B=x"], "a model 'B', and there is a, b"),
        (["--model", "a={file}", "--lora", "a=x"], "Two models or adapters have the name 'a'"),
        (["--model", "a={file}", "--model", "b={file}", "--lora", "s@a=x", "--lora", "s@b=y"], "the name 's'"),
    ],
)
def test_refusals(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["serve", *(option.format(file=__file__) for option in options)])
    except SystemExit as end:  # what argparse refuses
        status = int(end.code or 0)
    assert status == 2
    assert expected in capsys.readouterr().err


def test_serve_keeps_the_name_that_was_given(tmp_path: Path) -> None:
    model = tmp_path / "file.gguf"
    model.touch()
    for given, others, expected in ((str(model), None, str(model)), (None, [("a", str(model))], "")):
        settings, models = _models(Namespace(model=given, models=others, offline=True), ServerSettings())
        assert settings.model_given == expected
        assert settings.model_name == next(iter(models)) == ("file" if given else "a")
