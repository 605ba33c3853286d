"""Known faults of other engines' prefix caches and schedulers, each asked for at the level of
answers.

The cases are those of real bug reports; the entry of each in the list of faults is in its
docstring. `plain` answers come from an engine that caches nothing and runs one request at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kinds import KINDS, write_kind
from matrix import open_row
from seen import Seen

from martlet import LLM, SamplingParams
from martlet.cache import nodes
from martlet.types import Request, Scheduling

PAGE, CONTEXT = 32, 256
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
Ask = Callable[..., Any]


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(count)]


def said(output: Any) -> Any:
    """All of an answer that only equal bits make equal."""
    return output.prompt_logprobs, [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs]


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kind(request.param, tmp_path_factory.mktemp("kind"))


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Ask]:
    with open_row(path, CONTEXT, "f16", 8) as llm:
        yield lambda prompt, params=GREEDY: said(llm.generate([prompt], params)[0])


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with open_row(path, CONTEXT, "f16", 64, prefix_cache=True, max_seqs=16) as made:
        yield made
        made.engine.scheduler.check()


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_a_prompt_again(llm: LLM, plain: Ask, length: int) -> None:
    """fault KVC-01: the same prompt twice: the answer of the first time, all but the last token
    from the cache.
    """
    prompt = ids(length, length)
    for cached in (0, length - 1, length - 1):
        [output] = llm.generate([prompt], GREEDY)
        assert output.metrics is not None
        assert (said(output), output.metrics.n_cached) == (plain(prompt), cached)


@pytest.mark.parametrize("bits", [0, 8])
def test_digests_that_collide(
    path: Path, plain: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """fault KVC-03: all prompts have one digest, or one of 256: none gets another's pages, in
    memory or from disk.
    """
    whole = nodes._digest
    monkeypatch.setattr(nodes, "_digest", lambda data: (whole(data)[:1] if bits else b"") + bytes(31 - bits // 8))
    rng = random.Random(3)
    stems = [ids(70, 100 + number) for number in range(5)]
    prompts = [[*rng.choice(stems)[: rng.choice([0, 32, 50, 64, 70])], *ids(40, number)] for number in range(50)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    n_loaded = 0
    for _ in range(2):
        with open_row(path, CONTEXT, "f16", 8, prefix_cache=True, max_seqs=2, kv_disk=str(tmp_path)) as llm:
            outputs = llm.generate(prompts, params)
            assert [said(output) for output in outputs] == [plain(prompt, params) for prompt in prompts]
            assert sum(output.metrics.n_cached for output in outputs if output.metrics) > 0
            n_loaded += sum(output.metrics.n_loaded for output in outputs if output.metrics)
            llm.engine.scheduler.check()
    assert n_loaded > 0 or bits == 0


def test_salts(llm: LLM, plain: Ask) -> None:
    """fault KVC-05: one prompt under the salts a, b, a: found only the third time; the answer is
    one and the same.
    """
    prompt = ids(70, 1)
    cached = []
    for salt in ("a", "b", "a"):
        [output] = llm.generate([prompt], GREEDY, scheduling=Scheduling(cache_salt=salt))
        assert output.metrics is not None
        assert said(output) == plain(prompt)
        cached.append(output.metrics.n_cached)
    assert cached == [0, 0, 69]


def test_the_log_probabilities_of_a_cached_prompt(llm: LLM, plain: Ask) -> None:
    """fault KVC-07: of a prompt of three pages, twice, also where its beginning is cached: all, to
    the bit.
    """
    prompt = ids(3 * PAGE, 2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    assert said(llm.generate([prompt], GREEDY)[0]) == plain(prompt)
    for _ in range(2):
        output = llm.generate([prompt], params)[0]
        assert said(output) == plain(prompt, params)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)


def test_sixteen_at_once(llm: LLM, plain: Ask) -> None:
    """fault KVC-09: different prompts at the same time: each gets its own answer; some begin
    alike.
    """
    stem = ids(40, 5)
    prompts = [[*(stem if number % 2 else []), *ids(20 + number, 50 + number)] for number in range(16)]
    seen = Seen(llm)
    assert [said(output) for output in llm.generate(prompts, GREEDY)] == [plain(prompt) for prompt in prompts]
    assert seen.most_spans >= 8


@pytest.mark.parametrize("disk", [False, True])
def test_four_that_preempt(path: Path, plain: Ask, tmp_path: Path, disk: bool) -> None:
    """fault SCH-03: in too few pages the same ids, none twice and none missing, in the answers, the
    counts and the events.
    """
    prompts = [ids(20 + number, 10 + number) for number in range(4)]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=0)
    more = {"kv_disk": str(tmp_path)} if disk else {}
    with open_row(path, CONTEXT, "f16", 8, prefix_cache=True, max_seqs=4, **more) as llm:
        seen = Seen(llm)
        outputs = llm.generate(prompts, params)
    assert seen.n_preempted > 0
    assert not disk or seen.n_swapped > 0
    assert [said(output) for output in outputs] == [plain(prompt, params) for prompt in prompts]
    assert [output.metrics.n_generated for output in outputs if output.metrics] == [120] * 4
    assert [seen.answers.tokens[o.request_id, 0] for o in outputs] == [o.outputs[0].token_ids for o in outputs]


def test_an_abort_within_a_prompt(path: Path, plain: Ask) -> None:
    """fault SCH-05: ten chunks, given up after the third: pages are free at once, others do not
    notice, nor does who repeats it.
    """
    long, other = ids(200, 20), ids(30, 21)
    with open_row(path, CONTEXT, "f16", 10, prefix_cache=True, max_seqs=2, max_step_tokens=21) as llm:
        seen, engine = Seen(llm), llm.engine
        engine.add(Request("other", tuple(other), GREEDY))
        engine.step()
        engine.step()
        engine.add(Request("long", tuple(long), GREEDY))

        def chunks() -> list[int]:
            return [seen.chunks[i] for i, seq in seen.sequences.items() if seq.request.request_id == "long"]

        while chunks() != [3]:  # now and then a step has no prompt
            engine.step()
        used = engine.n_free_pages
        [end] = engine.abort("long")
        assert (end.request_id, str(end.finish)) == ("long", "abort")
        engine.scheduler.check()
        assert engine.n_free_pages > used
        while engine.has_work:
            engine.step()
        assert engine.n_free_pages == 10
        assert seen.answers.tokens["other", 0] == plain(other)[1][0][0]
        assert ("long", 0) not in seen.answers.tokens
        [again] = llm.generate([long], GREEDY)
        assert again.metrics is not None
        assert again.metrics.n_cached > 0  # the chunks that were computed are good
        assert said(again) == plain(long)


def test_a_long_prompt_beside_a_stream(path: Path, plain: Ask) -> None:
    """fault SCH-07: while a prompt of a hundred chunks is read, the other answer gets a token in
    every step.
    """
    long, other = ids(200, 30), ids(10, 31)
    params = SamplingParams(temperature=0, max_tokens=220, ignore_eos=True, logprobs=0)
    with open_row(path, CONTEXT, "f16", 20, max_seqs=2, max_step_tokens=3) as llm:
        seen, engine = Seen(llm), llm.engine
        engine.add(Request("stream", tuple(other), params))
        while not seen.answers.tokens["stream", 0]:
            engine.step()
        engine.add(Request("long", tuple(long), GREEDY))
        steps = 0
        while not seen.answers.tokens["long", 0]:
            before = len(seen.answers.tokens["stream", 0])
            engine.step()
            steps += 1
            assert len(seen.answers.tokens["stream", 0]) == before + 1
        assert 100 <= steps <= 104  # one step in 33 has no prompt: it shows what decoding takes
        while engine.has_work:
            engine.step()
        for name, prompt, asked in (("stream", other, params), ("long", long, GREEDY)):
            assert seen.answers.tokens[name, 0] == plain(prompt, asked)[1][0][0]
