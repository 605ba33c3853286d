"""Toy parts do what their docstring shows; every family loads and answers; a wrong page is seen."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest

from martlet import LLM, SamplingParams, toy
from martlet.errors import UnsupportedError


def test_the_example_of_the_docstring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(toy)
    assert (failed, tried) == (0, 5)


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_a_family_answers(family: str, tmp_path: Path) -> None:
    path = toy.write_model(tmp_path / "toy.gguf", family, n_layers=2)
    assert path.read_bytes() == toy.write_model(tmp_path / "same.gguf", family, n_layers=2).read_bytes()
    with LLM(str(path), threads=1, backend="reference") as llm:
        spec = llm._parts.spec
        assert (spec.family, len(spec.layers), spec.vocab, spec.hidden) == (family, 2, toy.VOCAB, toy.HIDDEN)
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
        [answer] = llm.generate("hello", params)[0].outputs
    assert len(answer.token_ids) == 6
    assert answer.cumulative_logprob is not None
    assert np.isfinite(answer.cumulative_logprob)


def test_changed_settings_and_tensors_are_in_the_file(tmp_path: Path) -> None:
    path = toy.write_model(
        tmp_path / "toy.gguf",
        tied=False,
        quantised=False,
        settings={"attention.sliding_window": 40},
        change=lambda name, values: values * 0 if name == "output.weight" else values,
    )
    with LLM(str(path), threads=1, backend="reference") as llm:
        assert {layer.mixer.window for layer in llm._parts.spec.layers} == {40}
        [answer] = llm.generate("x", SamplingParams(max_tokens=1, temperature=0, logprobs=1))[0].outputs
    assert answer.cumulative_logprob == pytest.approx(-np.log(toy.VOCAB))


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no toy model of the family 'gpt2'"):
        toy.write_model(tmp_path / "toy.gguf", "gpt2")


def test_the_byte_tokenizer_gives_every_byte_its_number() -> None:
    tokenizer = toy.byte_tokenizer()
    assert tokenizer.vocab_size == toy.END + 1
    assert tokenizer.encode("thé", add_special=False) == list("thé".encode())


def test_a_script_sees_a_page_that_was_overwritten() -> None:
    with toy.scripted_llm(toy.spell("abcdefghij")) as llm:
        stream = llm.stream("Why is it?", SamplingParams(max_tokens=8))
        assert next(stream) == "a"
        executor = llm.engine.executor
        assert isinstance(executor, toy.ScriptedExecutor)
        pages = next(iter(executor._sequences.values())).pages
        executor._contents[pages[0]] = list(executor._contents[pages[1]])
        with pytest.raises(AssertionError, match="a page does not hold the sequence's prefix"):
            list(stream)
