"""A draft head: what it guesses against its arithmetic in NumPy, what it is handed, and which files
are refused.

That answers do not depend on it stands in the matrix; faults SPD-01, SPD-03 and SPD-05 in
test_speculation.py, by the same door.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_head import HeadReference, followed, head_tensors, write_head

from martlet import LLM, SamplingParams, toy
from martlet.errors import FormatError, MartletError, RequestError, UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.decoder import Features, forward, hidden_states
from martlet.models.eagle_head import CODES, OUTPUT_CODES, open_head
from martlet.models.lora import Adapter
from martlet.models.weights import load_model
from martlet.ops.interface import StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend
from martlet.quant.encode import encode
from martlet.quant.ggml import decode
from martlet.quant.table import RawTensor
from martlet.toy import HIDDEN as C
from martlet.toy import VOCAB as V
from martlet.types import Request


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"))


OPTIONS: dict[str, Any] = {"threads": 1, "max_context": 200, "max_step_tokens": 48, "prefix_cache": False}


@pytest.fixture(scope="module")
def llm(tiny: Path, head: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "threads": 1,
        "max_context": 200,
        "max_seqs": 4,
        "max_step_tokens": 48,
        "prefix_cache": False,
    }
    with LLM(str(tiny), draft=f"eagle={head}", backend="reference", **options) as llm:
        yield llm


def as_packed(tensors: dict[str, Any]) -> dict[str, Any]:
    """The matrices as the head's codes hold them."""

    def held(name: str, values: Any) -> Any:
        kind = OUTPUT_CODES if name == "lm_head.weight" else CODES
        return decode(RawTensor("", values.shape, kind, encode(values, kind).reshape(-1)))

    return {name: held(name, values) if values.ndim == 2 else values for name, values in tensors.items()}


def reference(tiny: Path) -> HeadReference:
    with open_checkpoint(tiny) as checkpoint:
        embedding = decode(checkpoint.tensors["token_embd.weight"])
    return HeadReference(as_packed(head_tensors()), embedding)


def watched(llm: LLM) -> list[tuple[int, list[int], tuple[int, ...]]]:
    """Every proposal: of which sequence, after which ids, what."""
    made: list[tuple[int, list[int], tuple[int, ...]]] = []
    head: Any = llm.engine.executor._reader  # type: ignore[attr-defined]
    propose = head.propose

    def spy(wishes: Any) -> Any:
        found = propose(wishes)
        made.extend((w.seq, list(w.ids), p.ids) for w, p in zip(wishes, found, strict=True) if p is not None)
        return found

    head.propose = spy
    return made


def test_guesses_are_those_of_the_arithmetic(tiny: Path, llm: LLM) -> None:
    """Several sequences, prompts of several chunks and of a few ids, positions after pages' ends,
    guesses right and wrong.
    """
    features, made, by_hand = followed(llm), watched(llm), reference(tiny)
    prompts = ["The harbour was quiet. " * 5, "ab", "Two friends went for a walk"]
    llm.generate(prompts, SamplingParams(temperature=1.0, seed=2, max_tokens=44, draft_tokens=3, ignore_eos=True))
    assert len(made) > 100
    assert max(len(ids) for _, ids, _ in made) > 150
    for seq, ids, guesses in made[::7]:
        rows = np.array([features[seq][place][0] for place in range(len(ids) - 1)])
        expected, logits = by_hand.guesses(rows, ids, len(guesses))
        for guess, right, row in zip(guesses, expected, logits, strict=True):
            best = np.sort(row)[-2:]
            if best[1] - best[0] < 1e-2:
                break  # two that float16 keys cannot tell apart
            assert guess == right, f"after {len(ids)} ids"


def test_the_processors_kernels_guess_the_same(tiny: Path, head: Path) -> None:
    by_hand = reference(tiny)
    with LLM(str(tiny), draft=f"eagle={head}", threads=2, max_context=200, prefix_cache=False) as llm:
        features, made = followed(llm), watched(llm)
        params = SamplingParams(temperature=0.0, max_tokens=40, draft_tokens=3, ignore_eos=True)
        llm.generate(["The harbour was quiet. " * 5, "ab"], params)
    n_right = n_all = 0
    for seq, ids, guesses in made[::3]:
        rows = np.array([features[seq][place][0] for place in range(len(ids) - 1)])
        expected, _ = by_hand.guesses(rows, ids, 1)
        n_all, n_right = n_all + 1, n_right + (guesses[0] == expected[0])
    assert n_right >= 0.8 * n_all > 10, "bytes of activations turn over a few that are close"


@pytest.mark.parametrize("ends", [(), (3,)], ids=["three", "and the last norm's"])
def test_features_are_what_enters_the_layers(tiny: Path, ends: tuple[int, ...]) -> None:
    """Their norm is what a model of only the layers before gives; what the final norm gives is as
    it is.
    """
    ops, ids = ReferenceBackend(), np.arange(20, 29, dtype=np.int32)
    with open_checkpoint(tiny) as checkpoint:
        model = load_model(checkpoint, ops)
    limits, n = StepLimits(32, 1, 32, 1), len(ids)
    places = np.arange(n, dtype=np.int32)
    inputs = StepInputs(ids, places, places, np.array([0, n], np.int32), np.zeros((1, 1), np.int32), places[-1:])

    def caches(count: int) -> list[Any]:
        return [ops.kv_cache(1, 32, x.mixer.n_kv_heads, x.mixer.head_dim, "f32") for x in model.spec.layers[:count]]

    def both() -> Any:
        features = Features(ops, (0, 1, 2, *ends), C)
        return forward(ops, model, all_caches, features), features.out

    all_caches = caches(3)
    logits, features = ops.capture(both, limits).run(inputs)
    [plain] = [ops.capture(lambda: forward(ops, model, caches(3)), limits).run(inputs)]
    # BLAS adds in another order where there are more rows
    assert np.allclose(logits, plain, atol=1e-5)
    norm = np.asarray(model.final_norm)
    for layer in (0, 1, 2):
        shorter = replace(
            model, spec=replace(model.spec, layers=model.spec.layers[:layer]), layers=model.layers[:layer]
        )
        expected = ops.capture(lambda m=shorter, k=layer: hidden_states(ops, m, caches(k)), limits).run(inputs)
        x = features[:, layer * C : (layer + 1) * C]
        assert x.shape == (n, C)
        normed = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(model.spec.final_norm.eps)) * norm
        assert np.allclose(normed, expected, atol=1e-6)
    if ends:
        whole = ops.capture(lambda: hidden_states(ops, model, caches(3)), limits).run(inputs)
        assert np.array_equal(features[:, 3 * C :], whole)


def test_without_output_rows_it_takes_the_models(tiny: Path, tmp_path: Path) -> None:
    tensors = head_tensors()
    del tensors["lm_head.weight"]
    with LLM(str(tiny), draft=f"eagle={write_head(tmp_path, tensors)}", backend="reference", threads=1) as llm:
        made, features = watched(llm), followed(llm)
        params = SamplingParams(temperature=0.0, max_tokens=8, draft_tokens=1, ignore_eos=True)
        llm.generate("some text", params)
    with open_checkpoint(tiny) as checkpoint:
        embedding = decode(checkpoint.tensors["token_embd.weight"])
    by_hand = HeadReference(as_packed({**tensors, "lm_head.weight": embedding[32:128]}), embedding)
    for seq, ids, guesses in made:
        rows = np.array([features[seq][place][0] for place in range(len(ids) - 1)])
        assert list(guesses) == by_hand.guesses(rows, ids, 1)[0]


def with_guesses(params: SamplingParams, n: int) -> SamplingParams:
    return SamplingParams(**{**{f: getattr(params, f) for f in params.__dataclass_fields__}, "draft_tokens": n})


def test_memory_is_planned_with_the_head(tiny: Path, head: Path) -> None:
    with (
        LLM(str(tiny), draft="off", backend="null", threads=1) as off,
        LLM(str(tiny), draft=f"eagle={head}", backend="null", threads=1) as on,
    ):
        assert (
            on.plan.kv_per_token - off.plan.kv_per_token == 2 * 2 * 16 * 2
        )  # keys, values of 2 heads of 16 in float16
        n_values = C * 3 * C + 128 * 2 * C + C * 64 + 3 * 96 * C + 96 * C
        assert on.plan.weights - off.plan.weights == n_values * 34 // 32
        assert on.plan.activations > off.plan.activations


def test_pages_that_are_kept_know_the_head(tiny: Path, head: Path, tmp_path: Path) -> None:
    """With another head, or without, what is on disk is of no use."""
    other = write_head(tmp_path / "other", head_tensors(seed=6))
    hits = []
    for draft in ("off", f"eagle={head}", f"eagle={other}", f"eagle={head}"):
        options: dict[str, Any] = {"threads": 1, "max_context": 200, "kv_disk": str(tmp_path / "kept")}
        with LLM(str(tiny), draft=draft, backend="reference", **options) as llm:
            [output] = llm.generate("x" * 100, SamplingParams(temperature=0.0, max_tokens=4))
            assert output.metrics is not None
            hits.append(output.metrics.n_cached)
    assert hits == [0, 0, 0, 96]


# -- files that do not fit -------------------------------------------------------------------------
def changed(name: str, values: Any) -> dict[str, Any]:
    tensors = head_tensors()
    if values is None:
        del tensors[name]
    else:
        tensors[name] = values
    return tensors


def not_a_number(name: str) -> dict[str, Any]:
    values = head_tensors()[name]
    values.reshape(-1)[7] = np.nan
    return changed(name, values)


FILES: list[tuple[dict[str, Any] | None, dict[str, Any], type[MartletError], str]] = [
    (None, {"hidden_size": 96}, UnsupportedError, "another model: its hidden size is 96, this model's 64"),
    (None, {"vocab_size": 300}, UnsupportedError, "another model: its vocabulary is 300, this model's 258"),
    (None, {"num_hidden_layers": 2}, UnsupportedError, "of 2 layers"),
    (None, {"draft_vocab_size": 95}, FormatError, "lm_head.weight has the shape 96x64, expected 95x64|has the shape"),
    (None, {"draft_vocab_size": 300}, FormatError, "draft_vocab_size is 300, expected 1 to 258"),
    (None, {"num_attention_heads": 3, "num_key_value_heads": 2}, FormatError, "3 heads cannot share 2"),
    (None, {"hidden_act": "relu"}, UnsupportedError, "hidden_act"),
    (None, {"quantization_config": {"bits": 4}}, UnsupportedError, "quantization_config"),
    (None, {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, UnsupportedError, "numbers from 0 to 2"),
    (None, {"eagle_aux_hidden_state_layer_ids": [0, 1]}, UnsupportedError, "3 numbers"),
    (None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, UnsupportedError, "3 numbers"),
    (changed("midlayer.hidden_norm.weight", None), {}, FormatError, "midlayer.hidden_norm.weight is missing"),
    (changed("fc.weight", np.zeros((C, C), np.float32)), {}, FormatError, "fc.weight has the shape 64x64"),
    (changed("midlayer.self_attn.q_proj.bias", np.zeros(64, np.float32)), {}, UnsupportedError, "q_proj.bias"),
    (changed("d2t", None), {}, FormatError, "d2t is missing"),
    (changed("d2t", np.full(96, 200)), {}, FormatError, "d2t names ids outside 0 to 257"),
    (changed("d2t", 32 - np.arange(96)), {}, FormatError, "d2t names ids outside|one twice"),
    (changed("d2t", np.full(96, 32, np.float32)), {}, FormatError, "d2t has the type F32"),
    (changed("t2d", np.ones(V, bool)), {}, FormatError, "d2t and t2d disagree"),
    (not_a_number("fc.weight"), {}, FormatError, "fc.weight has values that are not finite"),
    (not_a_number("norm.weight"), {}, FormatError, "norm.weight has values that are not finite"),
]


@pytest.mark.parametrize(("tensors", "config", "error", "says"), FILES, ids=[case[3][:40] for case in FILES])
def test_a_file_that_does_not_fit_is_refused(
    tiny: Path,
    tmp_path: Path,
    tensors: dict[str, Any] | None,
    config: dict[str, Any],
    error: type[MartletError],
    says: str,
) -> None:
    folder = write_head(tmp_path, tensors, **config)
    with pytest.raises(error, match=says):
        LLM(str(tiny), draft=f"eagle={folder}", backend="reference", threads=1)


def test_what_is_no_head_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no file or folder.* eagle=smollm2-135m") as refused:
        LLM(str(tiny), draft=f"eagle={tmp_path / 'none'}", threads=1)
    assert refused.value.param == "draft"
    with pytest.raises(UnsupportedError, match="another model: its hidden size is 576"):
        LLM(str(tiny), draft="eagle=smollm2-135m", threads=1)
    with pytest.raises(FormatError, match=r"config\.json"):
        LLM(str(tiny), draft=f"eagle={tmp_path}", threads=1)
    pickle = write_head(tmp_path / "pickle")
    (pickle / "model.safetensors").rename(pickle / "pytorch_model.bin")
    with pytest.raises(FormatError, match="pickle"):
        LLM(str(tiny), draft=f"eagle={pickle}", threads=1)
    with pytest.raises(RequestError, match="eagle=PATH"):
        LLM(str(tiny), draft="eagle=", threads=1)
    with pytest.raises(UnsupportedError, match="oracle"):
        LLM(str(tiny), draft=f"eagle={write_head(tmp_path / 'fine')}", threads=1, oracle=True)


def test_layers_are_named_in_either_way(tiny: Path, tmp_path: Path) -> None:
    """At the top of config.json by the layer that is entered, under eagle_config by the one before;
    without a name by rule.
    """
    with open_checkpoint(tiny) as checkpoint:
        spec = load_model(checkpoint, ReferenceBackend()).spec
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}}, (1, 1, 2)),
    ]
    for number, (config, expected) in enumerate(cases):
        with open_head(write_head(tmp_path / str(number), **config), spec).checkpoint:
            assert open_head(tmp_path / str(number), spec).features == expected
    deep = replace(spec, layers=spec.layers * 4)
    assert open_head(write_head(tmp_path / "rule"), deep).features == (2, 6, 9)


def test_adapters_work_beside_it(tiny: Path, head: Path) -> None:
    """The program with adapters hands features over too."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, C), (96, 2)))
    adapter = Adapter("here", "digest", 2, a.nbytes + b.nbytes, {"blk.0.ffn_gate": (a, b)})
    found = []
    for draft in ("off", f"eagle={head}"):
        with LLM(str(tiny), draft=draft, backend="reference", threads=1, max_context=100) as llm:
            llm.engine.add_adapter(adapter)
            params = SamplingParams(
                temperature=0.0, max_tokens=12, ignore_eos=True, draft_tokens=None if draft == "off" else 2
            )
            llm.engine.add(Request("0", (65, 66, 67), params, adapter="digest"))
            ids = []
            while llm.engine.has_work:
                ids += [event.token_id for event in llm.engine.step() if event.token_id is not None]
            found.append(ids)
            if draft != "off":
                assert llm.engine.totals.speculation.n_drafted > 10
    assert found[0] == found[1]
