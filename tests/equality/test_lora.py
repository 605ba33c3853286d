"""Adapters of the offline API, the command line and replays: which one a request has, and what is
refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from martlet import LLM, LoRARequest, SamplingParams, toy
from martlet.cli import main
from martlet.errors import CapacityError, RequestError
from martlet.formats.checkpoint import open_checkpoint
from martlet.llm import BeamSearchParams
from martlet.machine import MachineLimits
from martlet.models.families import spec_of
from tests.models.adapter_files import random_updates, write_gguf_adapter, write_peft

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tiny.gguf, one/ and two.gguf."""
    folder = tmp_path_factory.mktemp("lora")
    with open_checkpoint(toy.write_model(folder / "tiny.gguf")) as checkpoint:
        spec = spec_of(checkpoint, 64)
    write_peft(folder / "one", random_updates(spec, 4, 1))
    write_gguf_adapter(folder / "two.gguf", random_updates(spec, 7, 2, products=("attn_v", "ffn_down")))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    lora = {"one": str(folder / "one"), "two": str(folder / "two.gguf")}
    with LLM(str(folder / "tiny.gguf"), threads=1, lora=lora) as llm:
        yield llm


def test_one_for_all_or_one_a_prompt(llm: LLM, folder: Path) -> None:
    """Also in chats, streams and beam searches; none is the model itself."""

    def text(lora: object) -> str:
        return str(llm.generate(PROMPT, PARAMS, lora_request=lora)[0].outputs[0].text)  # type: ignore[arg-type]

    each = [text(None), text("one"), text("two")]
    assert len(set(each)) == 3
    with LLM(str(folder / "tiny.gguf"), threads=1) as bare:
        assert bare.generate(PROMPT, PARAMS)[0].outputs[0].text == each[0]
        assert bare.list_loras() == []
    outputs = llm.generate([PROMPT] * 3, PARAMS, lora_request=[None, "one", LoRARequest("two", 2)])
    assert [output.outputs[0].text for output in outputs] == each
    assert text(LoRARequest("one", 1, str(folder / "one"))) == each[1]
    with llm.stream(PROMPT, PARAMS, lora_request="two") as stream:
        assert "".join(stream) == each[2]
    message = [{"role": "user", "content": "Hello"}]
    chats = [llm.chat(message, PARAMS, lora_request=name)[0].outputs[0].token_ids for name in (None, "one")]
    assert chats[0] != chats[1]
    with llm.stream_chat(message, PARAMS, lora_request="one") as stream:
        list(stream)
        assert stream.output.outputs[0].token_ids == chats[1]
    beams = [
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True), lora_request=name)[0]
        .sequences[0]
        .token_ids
        for name in (None, "one")
    ]
    assert beams[0] != beams[1]


def test_loaded_by_the_first_that_asks(llm: LLM, folder: Path) -> None:
    asked = LoRARequest("late", 3, str(folder / "one"))
    late = llm.generate(PROMPT, PARAMS, lora_request=asked)[0].outputs[0].text
    assert late == llm.generate(PROMPT, PARAMS, lora_request="one")[0].outputs[0].text
    assert llm.list_loras() == ["one", "two", "late"]
    with pytest.raises(RequestError, match=r"'late' is that of .*give it another name") as caught:
        llm.generate(PROMPT, PARAMS, lora_request=LoRARequest("late", 3, str(folder / "two.gguf")))
    assert caught.value.param == "lora_request"
    llm.add_lora("late", str(folder / "two.gguf"))  # in its place
    two = llm.generate(PROMPT, PARAMS, lora_request="two")[0].outputs[0].text
    assert llm.generate(PROMPT, PARAMS, lora_request="late")[0].outputs[0].text == two
    llm.remove_lora("late")
    # the same numbers, still there
    assert llm.generate(PROMPT, PARAMS, lora_request="two")[0].outputs[0].text == two
    for lora in ("late", ["one", "two"], 5):
        with pytest.raises(RequestError) as caught:
            llm.generate(PROMPT, PARAMS, lora_request=lora)  # type: ignore[arg-type]
        assert caught.value.param == "lora_request"
    with pytest.raises(RequestError, match="no adapter 'late'"):
        llm.remove_lora("late")
    with pytest.raises(RequestError, match="no file or folder"):
        llm.add_lora("late", str(folder / "none"))


@pytest.mark.parametrize("lora", ["one", {"": "x"}, {"a": ""}, {"a": 5}, {5: "a"}, {"a": "x\0"}, {"a": "/no/such"}])
def test_settings_that_cannot_be(lora: object, folder: Path) -> None:
    with pytest.raises(RequestError) as caught:
        LLM(str(folder / "tiny.gguf"), threads=1, lora=lora)  # type: ignore[arg-type]
    assert caught.value.param == "lora"


def test_the_plan_counts_them(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers, padded to four rows, and the activations of the step that uses them."""
    with LLM(str(folder / "tiny.gguf"), threads=1) as bare:
        plan = bare.plan
        assert "adapters" not in plan.explain()
    numbers = sum(llm._parts.adapters[name].nbytes for name in ("one", "two"))
    assert not llm._parts.adapters["one"].updates  # not kept a second time
    spec = llm._parts.spec
    attention = spec.layers[0].mixer
    q, kv, c = attention.n_heads * attention.head_dim, attention.n_kv_heads * attention.head_dim, spec.hidden
    f = spec.layers[0].ffn.ffn_hidden
    one = 4 * ((c + q) * 2 + (c + kv) * 2 + (c + f) * 3)
    two = 8 * ((c + kv) + (f + c))
    assert numbers == 4 * len(spec.layers) * (one + two)
    assert llm.plan.adapters == numbers + plan.activations + plan.logits
    assert llm.plan.total - llm.plan.kv == plan.total - plan.kv + llm.plan.adapters
    assert "adapters" in llm.plan.explain()
    monkeypatch.setattr("martlet.engine.lora.read_machine", lambda: MachineLimits(1, 1, None, None, 1000, ""))
    with pytest.raises(CapacityError, match="1,000 are free"):
        llm.add_lora("more", str(folder / "one"))


def test_replay(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capsule has the adapter's digest; without that adapter nothing is replayed, --force or
    not.
    """
    moved = tmp_path / "adapter"
    shutil.copytree(folder / "one", moved)
    capsule = tmp_path / "run.capsule"
    with LLM(str(folder / "tiny.gguf"), threads=1, lora={"sql": str(moved)}, capsule=str(capsule), seed=1) as llm:
        llm.generate([PROMPT] * 2, PARAMS, lora_request=["sql", None])
        digest = llm._parts.adapters["sql"].digest
    found = json.loads(capsule.read_text())
    assert [row.get("adapter") for row in found["requests"]] == [digest, None]
    assert found["settings"]["lora"] == {"sql": str(moved)}
    assert main(["replay", str(capsule), "-q"]) == 0
    moved.rename(tmp_path / "away")
    capsys.readouterr()
    for options in ([], ["--force"], ["--lora", f"other={folder / 'two.gguf'}"]):
        assert main(["replay", str(capsule), "-q", *options]) == 2
        said = capsys.readouterr().err
        assert digest in said
        assert "--lora NAME=PATH" in said
    assert main(["replay", str(capsule), "-q", "--lora", f"any={tmp_path / 'away'}"]) == 0


def test_command_line(folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", str(folder / "tiny.gguf"), PROMPT, "--raw", "-t", "1", "-n", "12", "--temp", "0", "--ignore-eos"]
    said = []
    for options in ([], ["--lora", str(folder / "one")]):
        assert main([*run, "--json", *options]) == 0
        said.append(json.loads(capsys.readouterr().out)["token_ids"])
    expected = [llm.generate(PROMPT, PARAMS, lora_request=name)[0].outputs[0].token_ids for name in (None, "one")]
    assert said == [list(ids) for ids in expected]
    for command, options in (("run", ["--lora", "a", "--lora", "b"]), ("chat", ["--lora", "a", "--lora", "b"])):
        assert main([command, str(folder / "tiny.gguf"), *options, *(["x"] if command == "run" else [])]) == 2
        assert "--lora is given 2 times" in capsys.readouterr().err
    assert main([*run, "--lora", str(folder / "none")]) == 2
    assert "There is no file or folder" in capsys.readouterr().err
