"""Sampling parameters at their extremes: refused by name, or of the value that mathematics
gives.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from martlet.errors import RequestError
from martlet.sample import logits as steps
from martlet.sample.logits import Candidates
from martlet.sampling_params import SamplingParams


@pytest.mark.parametrize("name", ["stop", "bad_words", "dry_sequence_breakers"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["a", "\ud800"], "surrogate"),
        ([f"{number}" for number in range(1025)], "1,025 strings"),
        ("a" * 65_537, "65,537 characters"),
    ],
)
def test_strings_that_cost_too_much_or_are_no_text(name: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name


def test_as_many_strings_as_are_allowed() -> None:
    assert len(SamplingParams(stop=tuple(map(str, range(1024)))).stop) == 1024
    assert len(SamplingParams(dry_sequence_breakers=("b",) * 64).dry_sequence_breakers) == 64
    with pytest.raises(RequestError, match="at most 64"):
        SamplingParams(dry_sequence_breakers=("b",) * 65)


@pytest.mark.parametrize("key", ["x", "٣", "1_0", " 5", "+5", "-5", "5.0", "", "9" * 5000, 5.0, True, None, -1])
def test_keys_of_logit_bias_that_are_no_ids(key: Any) -> None:
    from martlet.sampling_params import validate_for_vocab

    with pytest.raises(RequestError) as refused:
        validate_for_vocab(SamplingParams(logit_bias={key: 1.0}), 10)
    assert refused.value.param == "logit_bias"


def test_keys_of_logit_bias_as_json_has_them() -> None:
    assert SamplingParams(logit_bias={"5": 1, 7: 2.5, np.int64(8): 3}).logit_bias == {5: 1.0, 7: 2.5, 8: 3.0}


def test_the_highest_temperatures_make_all_tokens_equal() -> None:
    """T = value ± spread beyond the largest float: the logits' differences vanish, and no token is
    lost.
    """
    c = Candidates(np.arange(4), np.array([1.0, 2.0, 3.0, -50.0]))
    hot = steps.temperature(c, 1e308, 1.7e308, 1.0)
    assert hot.ids.tolist() == [0, 1, 2, 3]
    assert np.abs(hot.logits).max() < 1e-300


@pytest.mark.parametrize("name", ["spaces_between_special_tokens", "use_beam_search", "temprature", "guided_json"])
def test_a_parameter_that_does_not_exist_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        SamplingParams.from_dict({name: True})
    assert refused.value.param == name


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_field_refuses_a_value_of_no_sense_by_name(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: object()})
    assert refused.value.param == name
