"""The offline API on a real model: SmolLM2-135M-Instruct."""

from __future__ import annotations

import gc
import math
import string
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from martlet.llm import LLM
from martlet.sampling_params import SamplingParams

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    path: Path = request.getfixturevalue("smollm2_path")
    with LLM(str(path), max_context=1024) as loaded:
        yield loaded


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    [output] = llm.generate("The capital of France is", GREEDY)
    assert output.outputs[0].text.startswith(" Paris")


def test_a_chat_ends_by_itself(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "Say only: hello"}], SamplingParams(temperature=0, max_tokens=100))
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    assert "hello" in answer.text.lower()
    assert "<|im_end|>" not in answer.text
    assert "<|im_start|>user\nSay only: hello<|im_end|>" in (output.prompt or "")


def test_batched_and_streamed_answers_are_the_plain_ones(llm: LLM) -> None:
    prompts = ["The capital of France is", "def fib(n):", "Once upon a time, there was"]
    plain = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in prompts]
    batched = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    assert [answer.token_ids for answer in batched] == [answer.token_ids for answer in plain]
    assert "".join(llm.stream(prompts[1], GREEDY)) == plain[1].text


def test_the_head_that_comes_with_martlet_guesses_well_and_changes_nothing(llm: LLM, smollm2_path: Path) -> None:
    """Its folder says 0.73 of first guesses on prompts held out; a program that reads it wrongly
    guesses one in a hundred right.
    """
    talks = [
        [{"role": "user", "content": ask}] for ask in ("How do bees make honey?", "Write a letter to my landlord.")
    ]
    params = SamplingParams(temperature=0, max_tokens=80)
    plain = llm.chat(talks, params)
    with LLM(str(smollm2_path), max_context=1024, draft="eagle=smollm2-135m") as guessing:
        found = guessing.chat(talks, SamplingParams(temperature=0, max_tokens=80, draft_tokens=3))
        totals = guessing.engine.totals.speculation
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain]
    assert totals.accepted[0] > 0.35 * totals.drafted[0] > 10


def test_prompt_logprobs_say_which_text_is_likelier(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    sums = []
    for text in ("The sun rises in the east.", "The sun rises in the spoon."):
        [output] = llm.generate(text, params)
        assert output.outputs[0].token_ids == []
        scored = output.prompt_logprobs
        assert scored is not None
        assert len(scored) == len(output.prompt_token_ids)
        sums.append(sum(next(iter(entry.values())).logprob for entry in scored if entry))
    assert sums[0] > sums[1] + 3


def test_embeddings_are_nearer_for_nearer_texts(llm: LLM) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "The central bank raised interest rates."]
    cat, kitten, bank = (output.embedding for output in llm.encode(texts))
    assert float(np.dot(cat, kitten)) > float(np.dot(cat, bank))


def test_an_idle_engine_uses_no_processor(llm: LLM) -> None:
    llm.generate("Hi", GREEDY)
    time.sleep(0.2)  # its threads look for work a moment longer
    before = time.process_time()
    time.sleep(2.0)
    assert time.process_time() - before < 0.02


def test_close_frees_everything(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), max_context=256)
    llm.generate("Hi", GREEDY)
    engine = weakref.ref(llm._parts.engine)
    llm.close()
    gc.collect()
    assert engine() is None


def test_it_works_where_the_network_is_refused(smollm2_path: Path) -> None:
    code = (
        "import sys; from martlet.offline import forbid_network; forbid_network()\n"
        "from martlet import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], max_context=256, offline=True) as llm:\n"
        "    print(llm.generate('The capital of France is', SamplingParams(temperature=0, max_tokens=4)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2_path)], check=True, capture_output=True, text=True, timeout=120
    )
    assert "Paris" in done.stdout


def test_best_of_returns_the_likeliest_answers(llm: LLM) -> None:
    settings = {"temperature": 1.5, "max_tokens": 12, "seed": 11}
    [every] = llm.generate("A bird is", {**settings, "n": 5, "logprobs": 0})
    ranked = sorted(every.outputs, key=lambda o: (o.cumulative_logprob or 0.0) / len(o.token_ids), reverse=True)
    assert len({tuple(answer.token_ids) for answer in ranked}) == 5
    [best] = llm.generate("A bird is", {**settings, "n": 2, "best_of": 5})
    assert [answer.token_ids for answer in best.outputs] == [answer.token_ids for answer in ranked[:2]]
    assert [answer.index for answer in best.outputs] == [0, 1]
    assert [answer.logprobs for answer in best.outputs] == [None, None]


def test_a_chats_next_prompt_repeats_the_answers_own_tokens(llm: LLM) -> None:
    """ask 14, idea 3: ten turns, and each computes what is new in it, and the one token that was
    sampled and not computed.
    """
    messages = [{"role": "user", "content": "Invent five words."}]
    prompts: list[list[int]] = []
    # A token for each letter: the model spells words as the tokenizer would not.
    letters = [token for letter in string.ascii_lowercase for token in llm.get_tokenizer().encode(letter)]
    for seed in range(10):
        [output] = llm.chat(messages, {"max_tokens": 24, "seed": seed, "allowed_token_ids": letters})
        if prompts:
            assert output.prompt_token_ids[: len(prompts[-1])] == prompts[-1]
            assert output.metrics is not None
            new = len(output.prompt_token_ids) - len(prompts[-1])
            assert output.metrics.n_prompt - output.metrics.n_cached <= new + 1
        answer = output.outputs[0]
        said = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        prompts.append([*output.prompt_token_ids, *said])
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "More."}]
    canonical = llm.get_tokenizer().encode(llm.get_tokenizer().decode(prompts[-1]), parse_special=True)
    assert len(canonical) < len(prompts[-1])


def test_the_whole_vocabulary_of_logprobs_is_cheap(llm: LLM) -> None:
    """Their texts are made when they are asked for: decoding them takes most of a second."""
    start = time.process_time()
    [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0.0, logprobs=-1))
    took = time.process_time() - start
    assert output.outputs[0].logprobs is not None
    assert took / 8 < 0.05 + 0.05  # a token's own computing is 2 × 4 ms where nothing else runs
    for entry, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True):
        assert len(entry) == 49152
        assert next(iter(entry)) == token
        assert sum(math.exp(found.logprob) for found in entry.values()) == pytest.approx(1.0)
    best = output.outputs[0].logprobs[0]
    assert best[output.outputs[0].token_ids[0]].decoded_token == " Paris"
