"""Adapters in one step with others: each request gets the bits that it gets alone, and no prefix is
shared across adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from martlet import toy
from martlet.errors import RequestError
from martlet.formats.checkpoint import open_checkpoint
from martlet.llm import LLM
from martlet.models.families import spec_of
from martlet.sampling_params import SamplingParams
from martlet.types import FinishReason, Request
from tests.models.adapter_files import random_updates, write_peft

PARAMS = SamplingParams(max_tokens=24, temperature=0, logprobs=2, ignore_eos=True)
PROMPTS = [tuple(b"The quick brown fox jumps over the lazy dog. " * 2), tuple(b"page" * 12)]
NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    model = toy.write_model(folder / "tiny.gguf")
    with open_checkpoint(model) as checkpoint:
        spec = spec_of(checkpoint, 64)
    return {
        "": model,
        "one": write_peft(folder / "one", random_updates(spec, 4, 1)),
        "two": write_peft(folder / "two", random_updates(spec, 7, 2, products=("attn_q", "attn_v", "ffn_down"))),
    }


def opened(paths: dict[str, Path], *, loads: bool = True, **options: Any) -> LLM:
    llm = LLM(str(paths[""]), **{"threads": 1, "max_seqs": 8, **options})
    for name in NAMES[1:] if loads else ():
        llm._parts.add_adapter(name, str(paths[name]))
    return llm


def answers(llm: LLM, asked: list[tuple[str, int]]) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities of requests (adapter, prompt) that run together."""
    engine, adapters = llm._parts.engine, llm._parts.adapters
    found: list[list[Any]] = [[] for _ in asked]
    for number, (name, prompt) in enumerate(asked):
        digest = adapters[name].digest if name else ""
        engine.add(Request(str(number), PROMPTS[prompt], PARAMS, adapter=digest))
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if event.token_id is not None:
                found[int(event.request_id)].append((event.token_id, event.logprobs))
    engine.scheduler.check()
    return [tuple(row) for row in found]


ALL = [(name, prompt) for name in NAMES for prompt in (0, 1)]


@pytest.fixture(scope="module")
def plain(paths: dict[str, Path]) -> Iterator[dict[tuple[str, int], tuple[Any, ...]]]:
    """Each alone, without a cache; those without an adapter where none is loaded."""
    with opened(paths, prefix_cache=False) as llm, opened(paths, loads=False, prefix_cache=False) as bare:
        yield {ask: answers(llm if ask[0] else bare, [ask])[0] for ask in ALL}


def test_adapters_change_the_answers(plain: dict[tuple[str, int], tuple[Any, ...]]) -> None:
    assert len(set(plain.values())) == len(ALL)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threads": 2},
        {"max_step_tokens": 16},
        {"prefix_cache": False},
        {"kv_dtype": "q4"},
    ],
)
def test_the_same_bits_in_one_step(
    options: dict[str, Any], paths: dict[str, Path], plain: dict[tuple[str, int], tuple[Any, ...]]
) -> None:
    """Three rounds: computed, then from the prefix cache, then in another order."""
    expected = plain
    if "kv_dtype" in options:
        with opened(paths, prefix_cache=False, **options) as llm:
            expected = {ask: answers(llm, [ask])[0] for ask in ALL}
    with opened(paths, **options) as llm:
        for asked in (ALL, ALL, ALL[::-1]):
            assert answers(llm, asked) == [expected[ask] for ask in asked]


def test_no_prefix_is_shared_across_adapters(paths: dict[str, Path]) -> None:
    """Their keys and values differ. A salt that looks like an adapter's is none."""
    with opened(paths) as llm:
        answers(llm, [("one", 0)])
        digest = llm._parts.adapters["one"].digest
        cached = {}
        for name in NAMES:
            metrics = llm._parts.engine.add(
                Request("x", PROMPTS[0], PARAMS, adapter=llm._parts.adapters[name].digest if name else "")
            )
            while llm._parts.engine.has_work:
                llm._parts.engine.step()
            cached[name] = metrics.n_cached
        assert cached == {"": 0, "one": len(PROMPTS[0]) - 1, "two": 0}
        liar = llm.generate([{"prompt_token_ids": list(PROMPTS[0]), "cache_salt": f"adapter:{digest}:"}], PARAMS)[0]
        assert liar.metrics is not None
        assert liar.metrics.n_cached == 0


def test_an_adapter_that_is_removed_lasts_to_the_end_of_its_requests(
    paths: dict[str, Path], plain: dict[tuple[str, int], tuple[Any, ...]]
) -> None:
    with opened(paths) as llm:
        engine, digest = llm._parts.engine, llm._parts.adapters["one"].digest
        bank = engine.executor._rank.adapters
        engine.add(Request("x", PROMPTS[0], PARAMS, adapter=digest))
        engine.step()
        engine.remove_adapter(digest)
        assert digest in bank._slots
        with pytest.raises(RequestError, match="adapter"):
            engine.add(Request("y", PROMPTS[0], PARAMS, adapter=digest))
        came, finish = [], None
        while engine.has_work:
            for event in engine.step():
                came.append((event.token_id, event.logprobs))
                finish = event.finish or finish
        assert tuple(came[-20:]) == plain["one", 0][-20:]
        assert finish == FinishReason.LENGTH
        assert digest not in bank._slots
        llm._parts.add_adapter("one", str(paths["one"]))
        assert answers(llm, [("one", 0), ("", 1)]) == [plain["one", 0], plain["", 1]]


def test_the_last_slot(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there are slots is refused; a slot that is free again is used again."""
    from martlet.errors import CapacityError
    from martlet.runtime import lora as adapters

    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 1)
    with opened(paths, loads=False) as llm:
        llm._parts.add_adapter("one", str(paths["one"]))
        llm._parts.add_adapter("again", str(paths["one"]))  # the same numbers: the same slot
        with pytest.raises(CapacityError, match="unload"):
            llm._parts.add_adapter("two", str(paths["two"]))
        llm._parts.engine.remove_adapter(llm._parts.adapters["one"].digest)
        llm._parts.add_adapter("two", str(paths["two"]))
