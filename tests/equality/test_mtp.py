"""A model's own layer for multi-token prediction: guesses against its arithmetic in NumPy, answers
unchanged, refusals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from test_draft_head import as_packed, watched, with_guesses
from tiny_head import followed

from martlet import LLM, SamplingParams, toy
from martlet.errors import FormatError, MartletError, RequestError, UnsupportedError
from martlet.toy import VOCAB as V

C, F, L, H, G, D, EPS, BASE = 64, 96, 3, 4, 2, 16, 1e-5, 640.0
CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "hidden_size": C,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "num_nextn_predict_layers": 1,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "rope_theta": BASE,
    "rms_norm_eps": EPS,
    "attention_bias": True,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
Tensors = dict[str, NDArray[np.float32]]


def layer(rng: np.random.Generator, prefix: str) -> Tensors:
    def matrix(n: int, k: int) -> Any:
        return rng.standard_normal((n, k)) * k**-0.5

    found = {
        "input_layernorm.weight": 1 + 0.1 * rng.standard_normal(C),
        "post_attention_layernorm.weight": 1 + 0.1 * rng.standard_normal(C),
        "self_attn.o_proj.weight": matrix(C, H * D),
        "mlp.gate_proj.weight": matrix(F, C),
        "mlp.up_proj.weight": matrix(F, C),
        "mlp.down_proj.weight": matrix(C, F),
    }
    for name, n in (("q", H * D), ("k", G * D), ("v", G * D)):
        found[f"self_attn.{name}_proj.weight"] = matrix(n, C)
        found[f"self_attn.{name}_proj.bias"] = rng.standard_normal(n)
    return {f"{prefix}{name}": values.astype(np.float32) for name, values in found.items()}


def tensors_of(seed: int = 3) -> Tensors:
    rng = np.random.default_rng(seed)
    found = {
        "model.embed_tokens.weight": rng.standard_normal((V, C)),
        "model.norm.weight": 1 + 0.1 * rng.standard_normal(C),
        "lm_head.weight": rng.standard_normal((V, C)) * 0.4,
        "model.mtp_layers.0.input_proj.weight": rng.standard_normal((C, 2 * C)) * C**-0.5,
        **{
            f"model.mtp_layers.0.{n}_layernorm.weight": 1 + 0.2 * rng.standard_normal(C)
            for n in ("token", "hidden", "final")
        },
    }
    made: Tensors = {name: values.astype(np.float32) for name, values in found.items()}
    for i in range(L):
        made |= layer(rng, f"model.layers.{i}.")
    return made | layer(rng, "model.mtp_layers.0.")


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A Hugging Face folder; the vocabulary is that of the toy models."""
    folder.mkdir(parents=True, exist_ok=True)
    # GPT-2's letters for bytes
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = {byte: chr(256 + number) for number, byte in enumerate(b for b in range(256) if b not in kept)}
    vocab = {rest.get(byte, chr(byte)): byte for byte in range(256)} | {"th": 257}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {
        "id": 256,
        "content": "<|end|>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    text = {"added_tokens": [end], "pre_tokenizer": level, "decoder": level, "normalizer": None, "post_processor": None}
    text["model"] = {"type": "BPE", "vocab": vocab, "merges": [["t", "h"]]}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **text}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Reference:
    """The layer in float64, a whole sequence at a time, from its description in vLLM's model of
    MiMo.
    """

    def __init__(self, tensors: Tensors) -> None:
        packed = as_packed({name: values for name, values in tensors.items() if "mtp_layers" in name})
        self.w = {name.removeprefix("model.mtp_layers.0."): np.asarray(x, np.float64) for name, x in packed.items()}
        self.embedding, self.output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    def normed(self, x: Any, name: str) -> Any:
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * self.w[f"{name}.weight"]

    def run(self, x: Any, ids: list[int]) -> tuple[Any, Any]:
        """(logits, x) of positions 0 …, from features x [n, C] and the ids of 1 …"""
        w, n = self.w, len(ids)
        embedded = self.embedding[ids].astype(np.float64)
        embedded[0] = 0.0
        both = np.concatenate([self.normed(x, "hidden_layernorm"), self.normed(embedded, "token_layernorm")], axis=1)
        x = both @ w["input_proj.weight"].T
        y = self.normed(x, "input_layernorm")
        q, k, v = (
            (y @ w[f"self_attn.{p}_proj.weight"].T + w[f"self_attn.{p}_proj.bias"]).reshape(n, -1, D).transpose(1, 0, 2)
            for p in "qkv"
        )
        q, k = self.turned(q), self.turned(k)
        scores = q @ np.repeat(k, H // G, axis=0).transpose(0, 2, 1) * D**-0.5
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        mixed = (shares @ np.repeat(v, H // G, axis=0)).transpose(1, 0, 2).reshape(n, -1)
        x = x + mixed @ w["self_attn.o_proj.weight"].T
        y = self.normed(x, "post_attention_layernorm")
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        x = self.normed(x, "final_layernorm")
        return x @ self.output.T, x

    def turned(self, x: Any) -> Any:
        angles = np.arange(x.shape[1])[:, None] * BASE ** (-np.arange(0, D, 2) / D)
        a, b = np.split(x, 2, axis=2)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], 2)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mimo"), tensors_of())


OPTIONS: dict[str, Any] = {"threads": 1, "max_context": 200, "max_step_tokens": 48, "prefix_cache": False}


def test_guesses_are_those_of_the_arithmetic(mimo: Path) -> None:
    """The embedding at position 0 hidden, and its own output read again for the second guess."""
    with LLM(str(mimo), draft="mtp", backend="reference", **OPTIONS) as llm:
        made, features = watched(llm), followed(llm)
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
        prompts = ["The harbour was quiet. " * 3, "ab"]
        outputs = [llm.generate(prompts, with_guesses(params, n)) for n in (0, 2)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    assert len(made) > 40
    by_hand, n_compared = Reference(tensors_of()), 0
    for seq, ids, guesses in made:
        x = np.array([features[seq][place][0] for place in range(len(ids) - 1)], np.float64)
        known = list(ids[1:])
        for guess in guesses:
            logits, out = by_hand.run(x, known)
            best = np.sort(logits[-1])[-2:]
            if best[1] - best[0] < 1e-2:
                break  # two that float16 keys cannot tell apart
            assert guess == logits[-1].argmax(), f"after {len(ids)} ids"
            known.append(guess)
            x = np.concatenate([x, out[-1:]])
            n_compared += 1
    assert n_compared > 60


def test_without_the_layer_it_is_a_qwen2(mimo: Path, tmp_path: Path) -> None:
    plain = {name: values for name, values in tensors_of().items() if "mtp_layers" not in name}
    qwen = write(tmp_path / "qwen", plain, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    params, found = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3), []
    for path in (mimo, qwen):
        with LLM(str(path), draft="off", backend="reference", **OPTIONS) as llm:
            [output] = llm.generate("some words", params)
            found.append((output.outputs[0].token_ids, repr(output.outputs[0].logprobs)))
    assert found[0] == found[1]


def test_answers_are_those_without(mimo: Path) -> None:
    """Two at a time and shared prefixes, on the processor's kernels."""
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True, logprobs=2, n=2)
    found = []
    for draft in ("off", "mtp"):
        with LLM(str(mimo), draft=draft, threads=1, max_context=200, max_seqs=4) as llm:
            outputs = llm.generate(["The harbour", "ab"], params if draft == "off" else with_guesses(params, 4))
            found.append([(c.token_ids, repr(c.logprobs)) for o in outputs for c in o.outputs])
            assert (llm.engine.totals.speculation.n_drafted > 100) == (draft != "off")
    assert found[0] == found[1]


def without(name: str) -> Tensors:
    found = tensors_of()
    del found[f"model.mtp_layers.0.{name}"]
    return found


SECOND = tensors_of() | {"model.mtp_layers.1.input_proj.weight": np.zeros((C, 2 * C), np.float32)}
WIDE = tensors_of() | {"model.mtp_layers.0.input_proj.weight": np.zeros((C, 3 * C), np.float32)}
MORE = tensors_of() | {"model.mtp_layers.0.shared_head.weight": np.zeros((C, C), np.float32)}
NAN = tensors_of() | {"model.mtp_layers.0.final_layernorm.weight": np.full(C, np.nan, np.float32)}
FILES: list[tuple[Tensors, type[MartletError], str]] = [
    (without("token_layernorm.weight"), FormatError, r"mtp_layers\.0\.token_layernorm\.weight is missing"),
    (without("self_attn.k_proj.bias"), FormatError, r"mtp_layers\.0\.self_attn\.k_proj\.bias is missing"),
    (WIDE, FormatError, "input_proj.weight has the shape 64x192, expected 64x128"),
    (SECOND, UnsupportedError, "1 such layer is supported"),
    (MORE, UnsupportedError, r"mtp_layers\.0\.shared_head"),
    (NAN, FormatError, "values that are not finite"),
]


@pytest.mark.parametrize(("tensors", "error", "says"), FILES, ids=[case[2][:30] for case in FILES])
def test_a_layer_that_does_not_fit_is_refused(
    tmp_path: Path, tensors: Tensors, error: type[MartletError], says: str
) -> None:
    path = write(tmp_path, tensors)
    with pytest.raises(error, match=says):
        LLM(str(path), draft="mtp", backend="reference", threads=1)


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    path = toy.write_model(tmp_path / "tiny.gguf")
    with pytest.raises(RequestError, match="no layers for multi-token prediction") as refused:
        LLM(str(path), draft="mtp", threads=1)
    assert refused.value.param == "draft"
