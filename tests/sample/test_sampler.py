"""The sampler as a whole: masks, order, state, log-probabilities.

Every sampling entry of the fault log.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from martlet.errors import RequestError, SampleError
from martlet.sample.sampler import bad_word_ids
from martlet.sampling_params import DEFAULT_ORDER, SamplingParams
from martlet.toy import byte_tokenizer
from tests.sample.toy import logits, sampler, sequence


def first(row: NDArray[np.float32], *, vocab: int | None = None, prompt: Any = (0,), **settings: Any) -> int:
    return sequence(vocab or len(row), prompt, **settings).sample(row)[0]


def drawn(row: NDArray[np.float32], n: int, **settings: Any) -> set[int]:
    seq = sequence(len(row), **settings)
    return {seq.sample(row)[0] for _ in range(n)}


# -- the fault log


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-8, 1e-30, 1e-300])
def test_tiny_temperature(temperature: float) -> None:
    """Fault SMP-01."""
    assert drawn(logits(1, 2, 400, -400), 20, temperature=temperature) == {2}
    assert drawn(logits(-65504, 65504, 6e-8), 20, temperature=temperature) == {1}


@pytest.mark.parametrize("settings", [{"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1}, {"top_k": 1}])
def test_one_candidate_always_survives(settings: dict[str, float]) -> None:
    """Fault SMP-03."""
    assert drawn(logits(1, 3, 2), 20, **settings) == {1}
    flat = drawn(logits(*[2.0] * 10), 300, **settings)
    assert flat == ({0} if "min_p" not in settings else set(range(10)))
    assert drawn(logits(-1e4, 1e4), 20, **settings) == {1}


def test_top_p_of_one_changes_nothing() -> None:
    """Fault SMP-03."""
    row = np.random.default_rng(1).normal(0, 2, 300).astype(np.float32)
    plain, with_p = sequence(300), sequence(300, top_p=1.0)
    assert [plain.sample(row) for _ in range(50)] == [with_p.sample(row) for _ in range(50)]


@pytest.mark.parametrize("top_k", [0, -1, None])
def test_top_k_off(top_k: int | None) -> None:
    """Fault SMP-05."""
    assert drawn(logits(1, 1, 1), 300, top_k=top_k) == {0, 1, 2}


def test_presence_and_frequency_count_the_answer_and_repetition_the_prompt_too() -> None:
    """Fault SMP-07."""
    row = logits(0, 0, 0, 0, 0, 0, 0, 5, 5)
    for setting in ("presence_penalty", "frequency_penalty"):
        seq = sequence(9, (7, 7, 7), temperature=0, **{setting: 2})
        assert [seq.sample(row)[0] for _ in range(2)] == [7, 8]
    assert first(row, prompt=(7, 7, 7), temperature=0, repetition_penalty=2) == 8


SCRIPTED = logits(3.0, 2.9, 2.5, 1.0, -1.0, -8.0)
DOCUMENTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0}),
    ({"temperature": 0.5}, {"temperature": 5.0}),
    ({}, {"dynatemp_range": 0.9}),
    ({"dynatemp_range": 0.9}, {"dynatemp_range": 0.9, "dynatemp_exponent": 9.0}),
    ({}, {"top_k": 1}),
    ({}, {"top_p": 0.3}),
    ({}, {"min_p": 0.9}),
    ({}, {"typical_p": 0.1}),
    ({}, {"top_n_sigma": 0.05}),
    ({}, {"xtc_probability": 1.0}),
    ({"xtc_probability": 1.0}, {"xtc_probability": 1.0, "xtc_threshold": 0.45}),
    ({}, {"repetition_penalty": 5.0}),
    ({}, {"presence_penalty": 2.0}),
    ({}, {"frequency_penalty": 2.0}),
    ({"repetition_penalty": 5.0}, {"repetition_penalty": 5.0, "penalty_last_n": 1}),
    ({"dry_allowed_length": 1}, {"dry_allowed_length": 1, "dry_multiplier": 5.0}),
    ({"dry_multiplier": 3.0}, {"dry_multiplier": 3.0, "dry_allowed_length": 1}),
    ({"dry_multiplier": 1.0, "dry_base": 1.0}, {"dry_multiplier": 1.0, "dry_base": 9.0}),
    ({"dry_multiplier": 5.0}, {"dry_multiplier": 5.0, "dry_sequence_breakers": ["a"]}),
    ({"dry_multiplier": 5.0}, {"dry_multiplier": 5.0, "dry_penalty_last_n": 2}),
    ({}, {"no_repeat_ngram_size": 4}),
    ({}, {"logit_bias": {5: 50}}),
    ({}, {"allowed_token_ids": [4, 5]}),
    ({}, {"bad_words": ["a", "b"]}),
    ({}, {"ignore_eos": True}),
    ({}, {"min_tokens": 90}),
    ({"min_tokens": 90}, {"min_tokens": 90, "stop_token_ids": [0]}),
    ({}, {"mirostat": 2, "mirostat_tau": 0.1}),
    ({"mirostat": 2, "mirostat_tau": 0.5}, {"mirostat": 2, "mirostat_tau": 0.5, "mirostat_eta": 0.9}),
    ({}, {"seed": 2}),
    ({"top_k": 2, "typical_p": 0.5}, {"top_k": 2, "typical_p": 0.5, "samplers": ["typical_p", "top_k"]}),
]


@pytest.mark.parametrize(("one", "other"), DOCUMENTED, ids=str)
def test_every_setting_changes_the_outcome(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Fault SMP-09."""
    outcomes = []
    for settings in (one, other):
        breakers: dict[str, Any] = {"dry_sequence_breakers": []} if "dry_multiplier" in settings else {}
        params = SamplingParams(**{"seed": 1, "max_tokens": None, **breakers, **settings})
        seq = sampler(6, eog=(1,)).start(params, (0, 1, 2, 0, 1, 2, 0, 1))
        outcomes.append([seq.sample(SCRIPTED)[0] for _ in range(90)])
    assert outcomes[0] != outcomes[1]


def test_neighbours_change_nothing() -> None:
    """Fault SMP-11: alone, beside an unseeded neighbour, as the second of a batch."""
    row = np.random.default_rng(2).normal(0, 1, 50).astype(np.float32)
    settings = {"seed": 42, "temperature": 0.9, "top_p": 0.9, "mirostat": 2}
    alone = sequence(50, **settings)
    expected = [alone.sample(row)[0] for _ in range(40)]
    shared = sampler(50)
    for order in ((0, 1), (1, 0)):
        pair = [
            shared.start(SamplingParams(max_tokens=None, **settings), (0,)),
            shared.start(SamplingParams(max_tokens=None), (0,)),
        ]
        for token in expected:
            got = {which: pair[which].sample(row)[0] for which in order}
            assert got[0] == token


@pytest.mark.parametrize("token", ["999999", 100, -1, "-1"])
def test_bias_outside_the_vocabulary_is_refused(token: int | str) -> None:
    """Fault SMP-13."""
    with pytest.raises(RequestError) as caught:
        sampler(100).check(SamplingParams(logit_bias={token: 5}))
    assert caught.value.param == "logit_bias"


def test_bias_bans_and_forces() -> None:
    """Fault SMP-15: A is favoured; -100 bans it, 100 on B forces B."""
    row = logits(0, 30, 0, 0)
    assert 1 not in drawn(row, 100, logit_bias={1: -100})
    assert drawn(row, 50, logit_bias={"2": 100}) == {2}
    assert first(row, temperature=0, logit_bias={1: -100}) == 0
    row = logits(0, 3e38, 0)  # whatever the lead, a ban is a ban
    assert 1 not in drawn(row, 50, logit_bias={1: -100})


def test_raw_logprobs_are_before_bias_and_processed_ones_after() -> None:
    """Fault SMP-15."""
    row = logits(0, 0)
    _, raw = sequence(2, logprobs=2, logit_bias={1: -100}).sample(row)
    assert raw is not None
    assert raw.top == ((0, pytest.approx(math.log(0.5))), (1, pytest.approx(math.log(0.5))))
    _, processed = sequence(2, logprobs=2, logit_bias={1: -100}, logprobs_mode="processed").sample(row)
    assert processed is not None
    assert processed.top == ((0, 0.0),)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"top_k": 2, "logprobs": 3}])
@pytest.mark.parametrize("bad", [[0, math.nan, 1], [math.nan] * 3, [0, math.inf, 1], [-math.inf] * 3])
def test_unusable_logits_end_their_sequence_only(settings: dict[str, Any], bad: list[float]) -> None:
    """Fault SMP-17."""
    shared = sampler(3)
    params = SamplingParams(seed=3, max_tokens=None, **settings)
    broken, fine = shared.start(params, (0,)), shared.start(params, (0,))
    with pytest.raises(SampleError, match="not usable"):
        broken.sample(logits(*bad))
    assert broken.n_generated == 0
    assert fine.sample(logits(0, 9, 1))[0] in range(3)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"top_p": 0.9}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_beyond_the_vocabulary_and_unused_ids_are_never_sampled(settings: dict[str, Any], masked: bool) -> None:
    """Fault SMP-19: vocabulary 100, 128 logits, the best at 120.

    And unused ids inside the vocabulary.
    """
    row = np.zeros(128, np.float32)
    row[120] = 50
    row[[7, 9]] = 40
    mask = np.ones(128, np.bool_) if masked else None
    seq = sampler(100, unused=(7, 9), n_logits=128).start(SamplingParams(max_tokens=None, **settings), (0,))
    tokens = {seq.sample(row, mask)[0] for _ in range(200)}
    assert max(tokens) < 100
    assert not tokens & {7, 9}


def test_ids_that_only_the_tokenizer_has_are_never_sampled() -> None:
    seq = sampler(10, n_logits=8, eog=(9,), unused=(8,)).start(SamplingParams(temperature=0), (0,))
    assert seq.sample(logits(*range(8)))[0] == 7


# -- masks


def test_min_tokens_masks_every_end() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1], max_tokens=9)
    seq = sampler(4, eog=(0,)).start(params, (2,))
    assert [seq.sample(logits(9, 8, 7, 6))[0] for _ in range(3)] == [2, 2, 0]


def test_ignore_eos_masks_the_models_ends_and_not_the_callers() -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[1])
    seq = sampler(3, eog=(0,)).start(params, (2,))
    assert seq.sample(logits(9, 8, 7))[0] == 1


def test_allowed_token_ids() -> None:
    assert drawn(logits(9, 9, 0, 0), 100, allowed_token_ids=[2, 3]) == {2, 3}
    seq = sampler(4, unused=(3,)).start(SamplingParams(allowed_token_ids=[2, 3], max_tokens=None), (0,))
    assert {seq.sample(logits(9, 9, 0, 9))[0] for _ in range(50)} == {2}


def test_a_constraints_mask() -> None:
    mask = np.array([False, True, True])
    for settings in ({"temperature": 0}, {"top_p": 0.9}):
        seq = sequence(3, **settings)
        assert {seq.sample(logits(9, 1, 0), mask)[0] for _ in range(50)} <= {1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_is_an_error_of_this_sequence(temperature: float) -> None:
    seq = sequence(3, temperature=temperature, allowed_token_ids=[1])
    with pytest.raises(SampleError, match="No token may be sampled"):
        seq.sample(logits(1, 1, 1), np.array([True, False, True]))
    assert seq.n_generated == 0


def test_bad_words_of_several_tokens() -> None:
    row = logits(0, 0, 5, 4, 3)  # c, then d, then e
    seq = sequence(5, temperature=0, bad_words=["cc"], prompt=(2,))
    assert [seq.sample(row)[0] for _ in range(4)] == [2, 3, 2, 3]  # the prompt's c does not count
    assert first(row, temperature=0, bad_words=["c"]) == 3


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    ids = bad_word_ids(byte_tokenizer(), ("no",))
    assert set(ids) == {tuple(b"no"), tuple(b" no")}


def test_no_repeat_ngram() -> None:
    seq = sequence(3, (0, 1), temperature=0, no_repeat_ngram_size=2)
    # 10, 00, 02 (neither 00 nor 01), 20
    assert [seq.sample(logits(3, 2, 1))[0] for _ in range(4)] == [0, 0, 2, 0]


# -- DRY's breakers


def test_a_breaker_that_no_token_holds_is_refused() -> None:
    shared = sampler(3, texts=["ab", "\n", "c"])
    shared.check(SamplingParams(dry_multiplier=1, dry_sequence_breakers=["b", "\n"]))
    with pytest.raises(RequestError, match="'bc'") as caught:
        shared.check(SamplingParams(dry_multiplier=1, dry_sequence_breakers=["bc"]))
    assert caught.value.param == "dry_sequence_breakers"


def test_tokens_that_hold_a_breaker_break() -> None:
    assert sampler(3, texts=["ab", "\n", "c"]).breakers(("b", "c")).tolist() == [True, False, True]


# -- order


def test_the_order_is_llama_cpps_unless_asked_otherwise() -> None:
    assert DEFAULT_ORDER == (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typical_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )


def test_temperature_after_or_before_top_p() -> None:
    # p = (0.6, 0.3, 0.1): top_p 0.8 keeps two; at temperature 5 the three are nearly equal, and it
    # keeps three.
    row = logits(*np.log([0.6, 0.3, 0.1]))
    settings = {"temperature": 5.0, "top_p": 0.8}
    assert drawn(row, 300, **settings) == {0, 1}
    assert drawn(row, 300, **settings, samplers=["temperature", "top_p"]) == {0, 1, 2}


def test_penalties_after_truncation_cannot_bring_tokens_back() -> None:
    row = logits(2.0, 1.9, 0.0)
    settings = {"top_k": 1, "repetition_penalty": 9.0, "temperature": 1.0, "prompt": (0,)}
    assert drawn(row, 30, **settings) - {0}
    assert drawn(row, 30, **settings, samplers=["top_k", "penalties"]) == {0}


# -- state


ALL = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "penalty_last_n": 6,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": [],
    "no_repeat_ngram_size": 4,
    "bad_words": ["ab"],
    "temperature": 1.2,
}


@pytest.mark.parametrize("extra", [{"mirostat": 2}, {"xtc_probability": 0.5, "top_p": 0.9}])
def test_a_sequence_can_be_taken_back_and_continued(extra: dict[str, Any]) -> None:
    rows = np.random.default_rng(4).normal(0, 2, (30, 12)).astype(np.float32)
    seq = sequence(12, (1, 2, 3), **ALL, **extra)
    expected = [seq.sample(row)[0] for row in rows]
    for n in (29, 11, 0):
        seq.truncate(n)
        assert seq.n_generated == n
        assert seq.ids.tolist() == [1, 2, 3, *expected[:n]]
        assert [seq.sample(row)[0] for row in rows[n:]] == expected[n:]


def test_appended_tokens_count_as_if_sampled() -> None:
    rows = np.random.default_rng(4).normal(0, 2, (100, 12)).astype(np.float32)
    seq = sequence(12, (1, 2, 3), **ALL)
    expected = [seq.sample(row)[0] for row in rows]
    other = sequence(12, (1, 2, 3), **ALL)
    for n, token in enumerate(expected):
        if n % 3:
            other.append(token)
        else:
            assert other.sample(rows[n])[0] == token


def test_the_n_completions_differ_and_each_can_be_had_again() -> None:
    row = np.zeros(1000, np.float32)
    answers = [[sequence(1000, index=i, seed=5).sample(row)[0]] for i in range(8)]
    assert len({tuple(answer) for answer in answers}) == 8
    assert answers[3] == [sequence(1000, index=3, seed=5).sample(row)[0]]


def test_unseeded_sequences_differ() -> None:
    row = np.zeros(100_000, np.float32)
    shared = sampler(100_000)
    params = SamplingParams(max_tokens=None)
    assert len({shared.start(params, (0,)).sample(row)[0] for _ in range(8)}) > 1


def test_unseeded_sequences_of_a_seeded_sampler_can_be_had_again() -> None:
    params = SamplingParams()
    first, second = sampler(5, seed=9), sampler(5, seed=9)
    seeds = [first.start(params, (0,)).seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [second.start(params, (0,)).seed for _ in range(3)]


def test_logits_are_left_as_they_are() -> None:
    row = np.random.default_rng(6).normal(0, 2, 12).astype(np.float32)
    before = row.copy()
    sequence(12, **ALL, logit_bias={3: 5}, logprobs=2).sample(row)
    assert (row == before).all()


# -- greedy


@pytest.mark.parametrize("settings", [{"typical_p": 0.1}, {"top_k": 3}, {"top_n_sigma": 0.1}, {"mirostat": 2}])
def test_temperature_zero_takes_the_best_whatever_truncates(settings: dict[str, Any]) -> None:
    row = logits(*np.log([0.5, 0.25, 0.125, 0.125]))
    assert first(row, temperature=0, **settings) == 0
    # the way past the direct one
    assert first(row, temperature=0, frequency_penalty=0.1, **settings) == 0


def test_ties_go_to_the_lowest_id() -> None:
    assert first(logits(1, 5, 5, 5), temperature=0) == 1
    assert first(logits(1, 5, 5, 5), temperature=0, presence_penalty=1) == 1


def test_a_banned_best_token_gives_way_to_the_next() -> None:
    seq = sampler(3, unused=(1,)).start(SamplingParams(temperature=0), (0,))
    assert seq.sample(logits(1, 9, 2))[0] == 2


def test_xtc_and_dynamic_temperature_are_not_greedy() -> None:
    assert SamplingParams(temperature=0, typical_p=0.5, repetition_penalty=2).greedy
    assert not SamplingParams(temperature=0, xtc_probability=0.5).greedy
    assert not SamplingParams(temperature=0, dynatemp_range=0.5).greedy
    # the best of what XTC leaves
    assert first(logits(5, 4, 0), temperature=0, xtc_probability=1) == 1
