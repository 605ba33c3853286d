"""Odd values for what a request or an engine may be told: each is named, or answered; none harms
the next request.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from martlet import toy
from martlet.cli import main
from martlet.engine.beams import BeamSearchParams
from martlet.errors import CapacityError, RequestError
from martlet.llm import LLM
from martlet.runtime import disk_file as tier_file
from martlet.sampling_params import SamplingParams
from martlet.toy import CONTEXT
from martlet.types import Scheduling

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
STORY = "once upon a time there was a bird that never landed " * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return toy.write_model(tmp_path_factory.mktemp("odd") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    """It, loaded on the reference backend: what is asked here never reaches a kernel."""
    with LLM(str(tiny), backend="reference") as made:
        yield made


def ids(llm: LLM, prompt: str = STORY) -> list[int]:
    [output] = llm.generate(prompt, GREEDY)
    llm.engine.scheduler.check()
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["ttft_target_s", "itl_target_s", "queue_timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", True, [1], 10**400])
def test_a_time_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is .*expected seconds") as caught:
        Scheduling(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("priority", value) for value in (10**400, 1.5, "1", True, None, math.nan)),
        *((name, value) for name in ("tenant", "cache_salt") for value in (None, 5, b"x", "half \ud83d")),
    ],
)
def test_other_wishes_are_checked_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        Scheduling(**{name: value})
    assert caught.value.param == name


def test_half_a_surrogate_pair_as_a_salt_ends_nobody_elses_request(llm: LLM) -> None:
    alone = ids(llm, "another")
    with llm.stream("another", GREEDY) as stream:
        for ask in (
            lambda: llm.generate({"prompt": STORY, "cache_salt": "\ud800"}, GREEDY),
            lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY, cache_salt="\ud800"),
            lambda: llm.beam_search(
                {"prompt": STORY, "cache_salt": "\ud800"}, BeamSearchParams(beam_width=2, max_tokens=2)
            ),
        ):
            with pytest.raises(RequestError, match="cache_salt"):
                ask()
        for _ in stream:
            pass
        assert stream.result is not None
        assert list(stream.result.outputs[0].token_ids) == alone


@pytest.mark.parametrize("value", ["x", "", {}, 0, [Scheduling()]])
def test_wishes_of_another_type_are_refused_everywhere(llm: LLM, value: Any) -> None:
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    calls = [lambda: llm.stream("a", GREEDY, scheduling=value), lambda: llm.beam_search("a", beams, scheduling=value)]
    for call in calls:
        with pytest.raises(RequestError, match="scheduling is of type") as caught:
            call()
        assert caught.value.param == "scheduling"
    with pytest.raises(RequestError, match="scheduling is of type"):
        llm.generate(["a"], GREEDY, scheduling=[value])
    with pytest.raises(RequestError, match="expected BeamSearchParams"):
        llm.beam_search("a", {"beam_width": 2})  # type: ignore[arg-type]


def test_an_embedding_is_bound_by_the_context_and_not_by_its_pages(tiny: Path) -> None:
    with LLM(str(tiny), backend="reference", max_context=40) as llm:  # two pages: 64 positions
        before = ids(llm, "abc")
        assert len(llm.encode("x" * 40)) == 1
        for n_tokens in (41, 64, 65, CONTEXT + 1):
            with pytest.raises(RequestError, match=f"{n_tokens} tokens.*context holds 40.*by {n_tokens - 40} tokens"):
                llm.encode("x" * n_tokens)
        assert ids(llm, "abc") == before


def test_a_disk_without_room_for_one_page_costs_a_warning(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    """The header fits, and not one page: the probe at the start finds out."""
    write = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(tier_file.os, "pwrite", full)
    with pytest.warns(RuntimeWarning, match="no room for more KV pages"):
        made = LLM(str(tiny), backend="reference", kv_disk=str(tmp_path))
    with made:
        assert ids(made) == ids(llm)
        assert ids(made) == ids(llm)


@pytest.mark.parametrize("name", ["kv_disk", "trace", "capsule"])
@pytest.mark.parametrize("path", ["a\0b", "\ud800", ""])
def test_a_path_that_no_file_can_have(name: Any, path: str, tiny: Path) -> None:
    with pytest.raises(RequestError, match=f"{name} is .*expected the path") as caught:
        LLM(str(tiny), **{name: path})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["trace", "capsule"])
def test_a_record_that_cannot_be_written_is_named(name: Any, tiny: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "x.json", tmp_path):
        with pytest.raises(RequestError, match=f"{name} is {path}") as caught:
            LLM(str(tiny), backend="reference", **{name: str(path)})
        assert caught.value.param == name
    whole = tiny.read_bytes()
    with pytest.raises(RequestError, match="is the model as well"):
        LLM(str(tiny), backend="reference", **{name: str(tiny)})
    assert tiny.read_bytes() == whole
    assert list(tmp_path.iterdir()) == []


def test_a_capsule_never_takes_a_devices_place(tiny: Path, tmp_path: Path) -> None:
    """It is renamed into place, which, for root, would put a file where the device was."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="no regular file"):
        LLM(str(tiny), backend="reference", capsule=str(pipe))
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    both = str(tmp_path / "both")
    with pytest.raises(RequestError, match="the trace as well"):
        LLM(str(tiny), backend="reference", trace=both, capsule=both)


def test_memory_below_a_page_is_told_in_bytes(tiny: Path) -> None:
    with pytest.raises(CapacityError, match=r"kv_memory is 12,287 bytes, which hold 0 tokens.*needs 12,288 bytes"):
        LLM(str(tiny), backend="reference", kv_memory=12_287)


@pytest.mark.parametrize("command", ["kvcheck", "perplexity"])
def test_a_text_that_is_none_is_named(
    command: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.bin"
    text.write_bytes(b"ab\xff\xfe")
    assert main([command, str(tiny), str(text)]) == 2
    assert f"{text} is not UTF-8" in capsys.readouterr().err


def test_progress_is_for_a_terminal(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 400)
    assert main(["perplexity", str(tiny), str(text), "-c", "64", "--chunks", "2", "--backend", "reference"]) == 0
    found = capsys.readouterr()
    assert found.out.startswith("perplexity ")
    assert " of 2: " not in found.err
    assert found.err.strip("\n") == ""


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--json-schema", None, "cannot be read: No such file"),
        ("--grammar", None, "cannot be read: No such file"),
        ("--grammar", "  \n", "grammar is empty"),
        ("--grammar", "root ::= (", "a '(' that nothing closes"),
        ("--grammar", "start: (", "grammar"),
        ("--json-schema", '{"type": "string"', "JSON"),
        ("--json-schema", '{"not": {}}', "no value meets it"),
    ],
)
def test_a_form_that_is_none_is_a_sentence(
    option: str, content: str | None, says: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = tmp_path / "form"
    if content is not None:
        form.write_text(content)
    assert main(["run", str(tiny), "x", "--raw", "--backend", "reference", option, str(form)]) == 2
    assert says in capsys.readouterr().err


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"allOf": [schema]}
    for given in (schema, {"json": schema}, {"regex": schema}, {"tags": [{"begin": "a", "schema": schema}]}):
        with pytest.raises(RequestError):
            SamplingParams(structured=given)
    with pytest.raises(RequestError, match="too deep"):
        SamplingParams(temperature=schema)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["kvcheck", "perplexity"])
@pytest.mark.parametrize("chunks", ["0", "-1"])
def test_no_windows_are_refused(
    command: str, chunks: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 400)
    assert main([command, str(tiny), str(text), "-c", "64", "--chunks", chunks]) == 2
    assert f"chunks is {chunks}; expected 1 or more" in capsys.readouterr().err


def test_a_report_without_a_folder_is_refused_before_the_work(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nowhere" / "report"
    assert main(["bench", "throughput", str(tiny), "--requests", "1", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "its folder does not exist" in captured.err
