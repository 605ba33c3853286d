"""Adapters over HTTP: a model each to its clients, loaded and let go of while others are answered
(vLLM's routes).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from martlet.config import resolve_config
from martlet.engine.build import Built
from martlet.models.lora import read_adapter
from martlet.toy import END, Script, scripted_built
from tests.models.adapter_files import random_updates, write_peft
from tests.server.serving import Served, serving, wait_until


def script_of(names: dict[str, str]) -> Script:
    """Answers with the name of the adapter's file, or "base"."""

    def script(seq: Any, number: int) -> int:
        text = names.get(seq.request.adapter, "base")
        return ord(text[number]) if number < len(text) else END

    return script


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Served, Callable[[str], str]]]:
    """A server that allows updates, and what makes an adapter's folder for it."""
    names: dict[str, str] = {}
    with serving(script_of(names), allow_lora_updates=True) as server:

        def make(name: str) -> str:
            spec = server.service.built.spec
            path = write_peft(tmp_path / name, random_updates(spec, 2, seed=len(name)))
            names[read_adapter(path, spec).digest] = name
            return str(path)

        yield server, make
        server.check_idle()


def load(server: Served, name: str, path: str, **more: Any) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})


def text_of(server: Served, model: str | None = None) -> str:
    reply = server.chat(model=model)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == (model or "scripted")
    return str(reply.json()["choices"][0]["message"]["content"])


def test_an_adapter_is_a_model_to_its_clients(served: tuple[Served, Callable[[str], str]]) -> None:
    server, make = served
    path = make("sql")
    assert load(server, "my-sql", path).status_code == 200
    assert [text_of(server), text_of(server, "my-sql"), text_of(server)] == ["base", "sql", "base"]
    listed = {entry["id"]: entry for entry in server.http.get("/v1/models").json()["data"]}
    assert listed["my-sql"]["parent"] == "scripted"
    assert listed["my-sql"]["root"] == path
    assert server.http.get("/v1/models/my-sql").json()["parent"] == "scripted"
    stream = server.post("/v1/completions", {"prompt": "a", "model": "my-sql", "stream": True}).text
    assert '"model":"my-sql"' in stream
    refused = server.post("/v1/embeddings", {"input": "a", "model": "my-sql"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    assert server.post("/tokenize", {"prompt": "a", "model": "my-sql"}).json()["tokens"] == [97]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "my-sql"}).status_code == 200
    assert server.chat(model="my-sql").status_code == 404
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "my-sql"}).status_code == 404
    assert server.executor.executor.adapters == set()


def test_names_and_files(served: tuple[Served, Callable[[str], str]], tmp_path: Path) -> None:
    server, make = served
    one, other = make("one"), make("other")
    assert load(server, "a", one).status_code == 200
    taken = load(server, "a", other)
    assert (taken.status_code, taken.json()["error"]["code"]) == (400, "exists")
    assert load(server, "a", other, load_inplace=True).status_code == 200
    assert text_of(server, "a") == "other"
    assert load(server, "b", other).status_code == 200  # the same numbers under two names
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "a"}).status_code == 200
    assert text_of(server, "b") == "other"
    for name, path, param in (("scripted", one, "lora_name"), ("c", str(tmp_path / "none"), "lora_path")):
        refused = load(server, name, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert load(server, "c", one, base_model_name="nobody").status_code == 404
    assert len(server.executor.executor.adapters) == 1


def test_requests_that_run_keep_their_adapter(served: tuple[Served, Callable[[str], str]]) -> None:
    server, make = served
    server.executor.step_s = 0.02
    assert load(server, "long", make("l" * 60)).status_code == 200
    body = {"prompt": "a", "model": "long", "stream": True, "max_tokens": 60}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "long"}).status_code == 200
        assert len(server.executor.executor.adapters) == 1
        assert "".join(lines).count('"text":"l"') > 50
    wait_until(lambda: not server.executor.executor.adapters)


def test_updates_have_to_be_allowed(tmp_path: Path) -> None:
    with serving(script_of({})) as server:
        for path, body in (("load", {"lora_name": "a", "lora_path": "/etc"}), ("unload", {"lora_name": "a"})):
            refused = server.post(f"/v1/{path}_lora_adapter", body)
            assert refused.status_code == 403
            assert "--allow-lora-updates" in refused.json()["error"]["message"]


def test_a_model_that_is_loaded_again_has_its_adapters(tmp_path: Path) -> None:
    """Of the first, and of one that was closed for another."""
    names: dict[str, str] = {}

    def built(lora: dict[str, str]) -> Built:
        config = resolve_config({"model": __file__, "backend": "null", "max_seqs": 4, "max_context": 256})
        made = scripted_built(config, script_of(names), context=256, n_pages=512)
        for name, path in lora.items():
            made.add_adapter(name, path)
        return made

    more = {"scripted": built, "second": built}
    with serving(script_of(names), allow_lora_updates=True, more=more, max_loaded_models=1) as server:
        spec = server.service.built.spec
        path = write_peft(tmp_path / "sql", random_updates(spec, 2, seed=1))
        assert load(server, "sql", str(path)).status_code == 200
        assert load(server, "tune", str(path), base_model_name="second").status_code == 200
        for name in ("sql", "tune", "sql", "second", "tune"):
            assert server.chat(model=name).json()["model"] == name
        # whoever asks for a model is not to blame that an adapter of it is gone
        shutil.rmtree(path)
        assert "There is no file" in server.chat(model="scripted").json()["error"]["message"]
        parents = {entry["id"]: entry.get("parent") for entry in server.http.get("/v1/models").json()["data"]}
        assert parents == {"scripted": None, "second": None, "sql": "scripted", "tune": "second"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_replaced_while_a_request_is_read(
    served: tuple[Served, Callable[[str], str]], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The request is answered by the new one; if it was unloaded, there is no such model (any
    more).
    """
    server, make = served
    assert load(server, "style", make("first")).status_code == 200
    later = read_adapter(make("second one"), server.service.built.spec)
    bridge, built = server.service.bridge, server.service.built
    submit = bridge.submit
    swaps: list[Callable[[], None]] = [  # before each time that a request is submitted
        lambda: built.take_adapter("style", later),
        lambda: None,
        lambda: built.drop_adapter("style"),
    ]

    async def late(*args: Any, **options: Any) -> Any:
        await bridge.call(swaps.pop(0))
        return await submit(*args, **options)

    monkeypatch.setattr(bridge, "submit", late)
    reply = server.chat(model="style", stream=stream)
    assert reply.status_code == 200, reply.text
    if not stream:
        assert reply.json()["choices"][0]["message"]["content"] == "second one"
    gone = server.chat(model="style", stream=stream)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    monkeypatch.undo()
