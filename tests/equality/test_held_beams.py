"""Beam search with a form, against every text of the form counted one by one, and a search by
hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from martlet import toy
from martlet.errors import RequestError
from martlet.llm import LLM, BeamSearchParams, BeamSearchSequence
from martlet.sampling_params import SamplingParams
from martlet.toy import END

PROMPT = list(b"The quick brown fox jumps over the dog")  # more than a page
CHOICE = ("cat", "car", "carts", "the", "thin", "o")
Beam = tuple[tuple[int, ...], float]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")), threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def logprobs(llm: LLM) -> Callable[[tuple[int, ...]], dict[int, float]]:
    """The model's log-probabilities of all next tokens, after an answer's."""

    @cache
    def found(ids: tuple[int, ...]) -> dict[int, float]:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
        [output] = llm.generate({"prompt_token_ids": [*PROMPT, *ids]}, params)
        assert output.outputs[0].logprobs is not None
        return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}

    return found


def nexts(llm: LLM, ids: tuple[int, ...]) -> list[int]:
    """What may come in a text of CHOICE: the tokens of which a text remains, and the end behind a
    whole one.
    """
    tokenizer = llm._parts.tokenizer
    written = b"".join(map(tokenizer.token_bytes, ids)).decode()
    found = [END] if written in CHOICE else []
    for token in range(tokenizer.vocab_size):
        text = b"" if token == END else tokenizer.token_bytes(token)
        if text and any(choice.encode().startswith(written.encode() + text) for choice in CHOICE):
            found.append(token)
    return found


def every(llm: LLM, logprobs: Callable[[tuple[int, ...]], dict[int, float]]) -> list[Beam]:
    """All sequences of tokens that spell a text of CHOICE and end, with their log-probabilities."""
    done: list[Beam] = []
    ahead: list[Beam] = [((), 0.0)]
    while ahead:
        ids, total = ahead.pop()
        for token in nexts(llm, ids):
            longer = ((*ids, token), total + logprobs(ids)[token])
            (done if token == END else ahead).append(longer)
    return done


def search(
    llm: LLM, logprobs: Callable[[tuple[int, ...]], dict[int, float]], width: int, most: int, penalty: float
) -> list[Beam]:
    """A beam search over them, of each beam the 2 x width likeliest that may come."""

    def best(beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: beam[1] / len(beam[0]) ** penalty, reverse=True)[:width]

    beams: list[Beam] = [((), 0.0)]
    done: list[Beam] = []
    for _ in range(most):
        longer = []
        for ids, total in beams:
            ranked = sorted(nexts(llm, ids), key=lambda token: -logprobs(ids)[token])[: 2 * width]
            for token in ranked:
                (done if token == END else longer).append(((*ids, token), total + logprobs(ids)[token]))
        done, beams = best(done), best(longer)
    return best(done + beams)


def ids_of(sequences: list[BeamSearchSequence]) -> list[tuple[int, ...]]:
    return [beam.token_ids for beam in sequences]


def test_all_texts_of_a_form_are_found_in_the_order_of_their_probability(
    llm: LLM, logprobs: Callable[[tuple[int, ...]], dict[int, float]]
) -> None:
    expected = sorted(every(llm, logprobs), key=lambda beam: beam[1], reverse=True)
    assert len(expected) >= len(CHOICE)
    params = BeamSearchParams(beam_width=64, max_tokens=9, length_penalty=0, structured={"choice": CHOICE})
    [output] = llm.beam_search({"prompt_token_ids": PROMPT}, params)
    assert ids_of(output.sequences) == [ids for ids, _ in expected]
    assert [b.cum_logprob for b in output.sequences] == pytest.approx([total for _, total in expected], abs=1e-9)
    assert {beam.finish_reason for beam in output.sequences} == {"stop"}
    assert {beam.text for beam in output.sequences} == set(CHOICE)


@pytest.mark.parametrize(("width", "most", "penalty"), [(1, 6, 1.0), (2, 6, 1.0), (3, 3, 0.0), (2, 4, -2.0)])
def test_a_narrow_search_is_the_one_by_hand(
    llm: LLM, logprobs: Callable[[tuple[int, ...]], dict[int, float]], width: int, most: int, penalty: float
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=most, length_penalty=penalty, structured={"choice": list(CHOICE)}
    )
    [output] = llm.beam_search({"prompt_token_ids": PROMPT}, params)
    assert ids_of(output.sequences) == [ids for ids, _ in search(llm, logprobs, width, most, penalty)]


def test_beams_of_a_schema_end_only_where_it_is_met(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {
            "direction": {"enum": ["north", "south"]},
            "steps": {"type": "integer", "maximum": 9, "minimum": 0},
        },
        "required": ["direction", "steps"],
        "additionalProperties": False,
    }
    params = BeamSearchParams(beam_width=8, max_tokens=60, length_penalty=0, structured={"json": schema})
    outputs = llm.beam_search(["one bird", "two birds sing"], params)
    for output in outputs:
        assert {beam.finish_reason for beam in output.sequences} == {"stop"}
        values = [json.loads(beam.text) for beam in output.sequences]
        assert all(value["direction"] in ("north", "south") and value["steps"] in range(10) for value in values)
    assert [output.sequences for output in outputs] == [
        llm.beam_search(prompt, params)[0].sequences for prompt in ("one bird", "two birds sing")
    ]


def test_a_string_at_its_limit_is_told(llm: LLM) -> None:
    form = {"json": {"type": "string"}, "string_limit": 4}
    params = BeamSearchParams(beam_width=6, max_tokens=30, length_penalty=0, structured=form)
    [output] = llm.beam_search("one bird", params)
    assert output.sequences
    for beam in output.sequences:
        value = json.loads(beam.text)
        cut = len(json.dumps(value, ensure_ascii=False)[1:-1].encode()) >= 4
        assert (beam.finish_reason, beam.stop_reason) == (("length", "grammar_limit") if cut else ("stop", None))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"structured": {"regex": "("}}, "structured"),
        ({"structured": {"json": {"type": "string", "format": "regex"}}}, "structured"),
        ({"structured": {"form": "a"}}, "structured"),
        ({"structured": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_held_to_is_refused(llm: LLM, more: dict[str, object], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        llm.beam_search("a", BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **more}))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert len(llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=3))[0].sequences) == 2
