"""What `SamplingParams` accepts, refuses and works out."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from martlet.errors import RequestError
from martlet.sampling_params import STEP_SETTINGS, SamplingParams, validate_for_vocab

BAD: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("n", 10**9),
    ("best_of", 0),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", "1"),
    ("temperature", False),
    ("temperature", [1]),
    ("temperature", 10**400),
    ("top_p", 1.01),
    ("top_p", -0.01),
    ("top_k", -2),
    ("top_k", "40"),
    ("min_p", 2),
    ("typical_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than max_tokens
    ("seed", 2**64),
    ("seed", 0.5),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["x"]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [None]),
    ("allowed_token_ids", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: None}),
    ("logit_bias", {1.5: 1}),
    ("logit_bias", [1]),
    ("logprobs", -2),
    ("logprobs", True),
    ("prompt_logprobs", 1.0),
    ("logprobs_mode", "cooked"),
    ("ignore_eos", 1),
    ("detokenize", "no"),
    ("mirostat", 1),
    ("mirostat", 3),
    ("xtc_probability", 1.5),
    ("dry_base", 0.5),
    ("dry_allowed_length", 0),
    ("samplers", ["top_q"]),
    ("samplers", ["top_p", "top_p"]),
    ("truncate_prompt_tokens", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_defaults_are_vllms_and_everything_else_is_off() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.repetition_penalty, params.skip_special_tokens) == (16, 1.0, True)
    assert params.active_steps == ()
    assert not params.greedy


def test_null_means_the_default() -> None:
    everything = {spec.name: None for spec in fields(SamplingParams)}
    assert SamplingParams(**everything) == SamplingParams(max_tokens=None)


def test_values_are_normalised() -> None:
    params = SamplingParams(
        stop="end", stop_token_ids=[np.int64(3)], logit_bias={"5": 1}, top_k=-1, temperature=1, best_of=2, n=2
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {5: 1.0}
    assert params.top_k == 0
    assert isinstance(params.temperature, float)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="Did you mean 'top_p'") as caught:
        SamplingParams.from_dict({"topp": 0.5})
    assert (caught.value.param, caught.value.code) == ("topp", "unknown_parameter")
    assert SamplingParams.from_dict({"top_p": 0.5}) == SamplingParams(top_p=0.5)
    with pytest.raises(RequestError, match="Did you mean 'top_k'"):
        SamplingParams(samplers=["topk"])


def test_a_setting_whose_step_is_left_out_is_refused() -> None:
    with pytest.raises(RequestError, match="'min_p'") as caught:
        SamplingParams(min_p=0.1, samplers=["temperature"])
    assert caught.value.param == "min_p"
    with pytest.raises(RequestError) as caught:
        SamplingParams(frequency_penalty=0.1, samplers=["temperature"])
    assert caught.value.param == "frequency_penalty"


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


def test_active_steps() -> None:
    on: dict[str, Any] = {
        "repetition_penalty": 1.1,
        "dry_multiplier": 1,
        "top_n_sigma": 1,
        "top_k": 5,
        "typical_p": 0.5,
        "top_p": 0.5,
        "min_p": 0.5,
        "xtc_probability": 0.5,
        "temperature": 0.5,
    }
    assert SamplingParams(**on).active_steps == tuple(STEP_SETTINGS)
    assert SamplingParams(**on, mirostat=2).active_steps == ("penalties", "dry", "temperature")
    assert SamplingParams(**on, penalty_last_n=0, dry_penalty_last_n=0, xtc_threshold=0.6).active_steps == (
        "top_n_sigma",
        "top_k",
        "typical_p",
        "top_p",
        "min_p",
        "temperature",
    )
    reverse = tuple(reversed(STEP_SETTINGS))
    assert SamplingParams(**on, samplers=reverse).active_steps == reverse


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {"999999": 5}},
        {"allowed_token_ids": [3, 100]},
        {"stop_token_ids": [100]},
        {"logprobs": 101},
        {"prompt_logprobs": 101},
    ],
)
def test_ids_outside_the_vocabulary(settings: dict[str, Any]) -> None:
    """Fault SMP-13."""
    with pytest.raises(RequestError) as caught:
        validate_for_vocab(SamplingParams(**settings), 100)
    assert caught.value.param == next(iter(settings))
    validate_for_vocab(SamplingParams(**settings), 1_000_000)


def test_frozen_and_picklable() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={1: 2})
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
