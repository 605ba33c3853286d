"""Beam search against searches that know nothing of it: every continuation counted, and
transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from kinds import NAN_ID, write_nan_model

from martlet import toy
from martlet.errors import MartletError, RequestError
from martlet.llm import LLM, BeamSearchParams
from martlet.sampling_params import SamplingParams
from martlet.toy import CONTEXT, END
from martlet.toy import FFN_HIDDEN as F
from martlet.toy import HEAD_DIM as D
from martlet.toy import HIDDEN as C
from martlet.toy import N_HEADS as H
from martlet.toy import N_KV_HEADS as G
from martlet.toy import N_LAYERS as L
from martlet.toy import VOCAB as V

PROMPT = list(b"The quick brown fox jumps over the dog")  # more than a page


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")), threads=1) as loaded:
        yield loaded


def next_logprobs(llm: LLM, ids: list[int]) -> dict[int, float]:
    [output] = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0, logprobs=-1))
    assert output.outputs[0].logprobs is not None
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def test_a_beam_of_one_is_greedy(llm: LLM) -> None:
    [output] = llm.beam_search(
        {"prompt_token_ids": PROMPT}, BeamSearchParams(beam_width=1, max_tokens=40, ignore_eos=True)
    )
    settings = SamplingParams(max_tokens=40, temperature=0, logprobs=0, logit_bias=None)
    [greedy] = llm.generate({"prompt_token_ids": PROMPT}, settings)
    [beam] = output.sequences
    shared = greedy.outputs[0].token_ids
    assert list(beam.token_ids[: len(shared)]) == shared
    assert len(beam.token_ids) == 40
    if len(shared) == 40:
        assert beam.cum_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob, abs=1e-9)


def test_two_steps_are_those_of_a_search_by_hand(llm: LLM) -> None:
    """Width 3: of the continuations of the three likeliest first tokens the three likeliest."""
    first = sorted(next_logprobs(llm, PROMPT).items(), key=lambda item: -item[1])[:3]
    second = [((a, b), p + q) for a, p in first for b, q in next_logprobs(llm, [*PROMPT, a]).items()]
    expected = sorted(second, key=lambda item: -item[1])[:3]
    params = BeamSearchParams(beam_width=3, max_tokens=2, ignore_eos=True)
    [output] = llm.beam_search({"prompt_token_ids": PROMPT}, params)
    assert [beam.token_ids for beam in output.sequences] == [ids for ids, _ in expected]
    assert [beam.cum_logprob for beam in output.sequences] == pytest.approx([score for _, score in expected], abs=1e-9)
    assert {beam.finish_reason for beam in output.sequences} == {"length"}
    assert output.prompt_token_ids == PROMPT


def test_a_beam_that_ends_is_kept_and_ranked_by_its_length(llm: LLM) -> None:
    """The strongest reward for short answers puts the one that ends at once first, that for long
    ones nowhere near.
    """
    ends = next_logprobs(llm, PROMPT)[END]
    short, long = (
        llm.beam_search(
            {"prompt_token_ids": PROMPT}, BeamSearchParams(beam_width=128, max_tokens=2, length_penalty=penalty)
        )[0].sequences
        for penalty in (-100, 100)
    )
    assert (short[0].token_ids, short[0].finish_reason, short[0].text) == ((END,), "stop", "")
    assert short[0].cum_logprob == pytest.approx(ends, abs=1e-9)
    assert {len(beam.token_ids) for beam in short[1:]} == {len(beam.token_ids) for beam in long} == {2}


def test_several_prompts_are_each_their_own(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    alone = [llm.beam_search(prompt, params)[0].sequences for prompt in ("one bird", "two birds sing")]
    together = llm.beam_search(["one bird", "two birds sing"], params)
    assert [output.sequences for output in together] == alone
    assert [output.prompt for output in together] == ["one bird", "two birds sing"]


def test_the_context_ends_beams(llm: LLM) -> None:
    room = 5
    prompt = [65 + i % 26 for i in range(llm.plan.context - room)]
    [output] = llm.beam_search(
        {"prompt_token_ids": prompt}, BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    )
    assert [len(beam.token_ids) for beam in output.sequences] == [room, room]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 257),
        ("beam_width", True),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", 0.7),
        ("length_penalty", float("nan")),
        ("ignore_eos", 1),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, name: value})
    assert caught.value.param == name


def test_a_beam_wider_than_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.beam_search("a", BeamSearchParams(beam_width=200, max_tokens=1))
    assert caught.value.param == "beam_width"


def test_broken_logits_fail_and_leave_the_engine_of_use(tmp_path: Path) -> None:
    with LLM(str(write_nan_model(tmp_path / "nan.gguf")), threads=1) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        with pytest.raises(MartletError, match="not usable"):
            llm.beam_search({"prompt_token_ids": [NAN_ID]}, params)
        assert len(llm.beam_search("a", params)[0].sequences) == 2


def test_every_continuation_counted(llm: LLM) -> None:
    """As wide as all first tokens allow, two tokens: the best pair of all there are."""
    params = BeamSearchParams(beam_width=128, max_tokens=2, ignore_eos=True)
    [output] = llm.beam_search("b", params)
    first = next_logprobs(llm, list(b"b"))
    likeliest = sorted(first, key=lambda token: -first[token])[:128]
    best = max(
        (first[a] + p, (a, b))
        for a, b, p in itertools.chain.from_iterable(
            [(a, b, p) for b, p in next_logprobs(llm, [*b"b", a]).items()] for a in likeliest[:12]
        )
    )
    assert output.sequences[0].cum_logprob >= best[0] - 1e-9


@pytest.mark.oracle
def test_transformers_finds_the_same_beams(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = toy.write_model(tmp_path / "float.gguf", quantised=False)
    tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
        f"ffn_{x}": f"mlp.{x}_proj" for x in ("up", "gate", "down")
    }
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for name, values in tensors.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in (
                "attn_q",
                "attn_k",
            ):  # GGUF has the rows of a rotated pair side by side, transformers half a head apart
                values = values.reshape(-1, D // 2, 2, C).swapaxes(1, 2).reshape(values.shape)
            state[f"model.layers.{layer}.{names[part]}.weight"] = values
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=C,
        intermediate_size=F,
        num_hidden_layers=L,
        num_attention_heads=H,
        num_key_value_heads=G,
        head_dim=D,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    missing = model.load_state_dict(
        {name: torch.from_numpy(values.copy()) for name, values in state.items()}, strict=False
    )
    assert (missing.unexpected_keys, missing.missing_keys) == ([], ["lm_head.weight"])
    ids = torch.tensor([PROMPT])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=8,
        do_sample=False,
        length_penalty=0.0,
        eos_token_id=None,
    )
    with LLM(str(path), threads=1, kv_dtype="f32") as llm:
        params = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True, length_penalty=0)
        [output] = llm.beam_search({"prompt_token_ids": PROMPT}, params)
    assert [list(beam.token_ids) for beam in output.sequences] == found[:, len(PROMPT) :].tolist()
