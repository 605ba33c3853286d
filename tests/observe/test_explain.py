"""Why a prompt was not cached further, in words that name both sides (asks row 10, "prefix cache
never hits; nobody can see").
"""

from __future__ import annotations

import pytest

from martlet.metrics import RequestMetrics
from martlet.observe.cache_report import CacheReport, explain_cache
from martlet.toy import byte_tokenizer
from martlet.types import CacheUse, MissReason

PROMPT = [*b"system: be kind\n\nuser: hello"]


def report(use: CacheUse | None, saved_s: float | None = None) -> CacheReport | None:
    metrics = RequestMetrics(0.0, len(PROMPT), cache=use, saved_s=saved_s)
    return explain_cache(PROMPT, metrics, byte_tokenizer())


def test_the_first_token_that_differs_with_both_sides() -> None:
    """The prompt has a second line end at position 16, the cache an `u`: the template has
    changed.
    """
    found = report(CacheUse(16, 0, MissReason.DIFFERS, ord("u")), 0.25)
    assert found is not None
    assert (found.position, found.prompt_id, found.cached_id) == (16, 10, 117)
    assert (found.before, found.prompt_text, found.cached_text) == ("be kind\n", "\n", "u")
    assert not found.cut_differently
    assert found.explain() == (
        "cache: 16 of 28 prompt tokens, 250 ms saved; token 16 after 'be kind\\n' is '\\n' (10), and 'u' (117) in the cache"
    )


def test_the_same_text_in_other_tokens_is_suspected() -> None:
    """One line end in one token and two in another: the one text begins with the other."""
    one = CacheReport(9, 4, 0, MissReason.DIFFERS, None, "ab", 1, "\n", 2, "\n\n")
    assert one.cut_differently
    assert "cut into other tokens" in one.explain()
    assert not CacheReport(9, 4, 0, MissReason.DIFFERS, None, "ab", 1, "x", 2, "y").cut_differently


def test_reasoning_that_is_left_out_is_named() -> None:
    """ask 14: the cache has an answer with its reasoning, the next turn's prompt has it without."""
    one = CacheReport(90, 40, 0, MissReason.DIFFERS, None, "assistant\n", 1, "The", 2, "<think>")
    assert one.lacks_reasoning
    assert one.explain().endswith("in the cache; the reasoning of an earlier answer is not in the prompt")
    assert not CacheReport(90, 40, 0, MissReason.DIFFERS, None, "assistant\n", 1, "The", 2, "A").lacks_reasoning


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (MissReason.END, "the whole prompt was cached"),
        (MissReason.EMPTY, "no earlier prompt continues like this"),
        (MissReason.EVICTED, "cached and evicted"),
        (MissReason.SALT, "another cache_salt"),
        (MissReason.SCORED, "prompt_logprobs"),
        (MissReason.OFF, "is off"),
    ],
)
def test_every_other_reason_has_its_words(reason: MissReason, words: str) -> None:
    found = report(CacheUse(3, 0, reason))
    assert found is not None
    assert found.explain().startswith("cache: 3 of 28 prompt tokens; ")
    assert words in found.explain()
    assert found.prompt_id is None


def test_tokens_from_disk_are_told_apart() -> None:
    found = report(CacheUse(20, 8, MissReason.END))
    assert found is not None
    assert "20 of 28 prompt tokens (8 from disk)" in found.explain()


def test_a_request_that_never_ran_has_no_report() -> None:
    assert report(None) is None


def test_every_reason_is_covered() -> None:
    for reason in MissReason:
        assert CacheReport(9, 4, 0, reason, None).explain()
