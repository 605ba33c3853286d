"""The memory plan: sums worked by hand, and refusals that say what to change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from martlet.config import EngineConfig, resolve_config
from martlet.engine.memory import OVERHEAD_BYTES, Footprint, context_table, plan_memory, step_limits
from martlet.errors import CapacityError, RequestError
from martlet.machine import MachineLimits
from martlet.spec import Activation, Attention, DenseFfn, Layer, ModelSpec, Norm

MIB = 1 << 20
NORM = Norm(1e-5)
# 4 layers of 2 KV heads of 64: 2 * 2 * 64 * 4 = 1,024 values a token, 2 KiB as f16, 4 KiB as f32.
LAYER = Layer(Attention(8, 2, 64, 0.125, None), DenseFfn(64, Activation.SILU), NORM, NORM)
SPEC = ModelSpec("llama", "tiny", 1000, 512, 8192, (LAYER,) * 4, NORM, True)
FOOTPRINT = Footprint(SPEC, weights=100 * MIB, token_bytes=100 * MIB, activations=20 * MIB, logits=10 * MIB)
FIXED = 130 * MIB + OVERHEAD_BYTES


def config(**options: Any) -> EngineConfig:
    return resolve_config({"model": "m", **options}, {}, MachineLimits(1, 1, None, None, None, None))


def available_for(usable: int) -> int:
    """The available memory of which 90 % is `usable`, rounded up."""
    return -(-usable * 10 // 9)


def test_the_sum() -> None:
    plan = plan_memory(FOOTPRINT, config(max_seqs=1), available_for(FIXED + 100 * MIB))
    assert plan.kv_per_token == 2048
    assert (plan.context, plan.n_pages, plan.kv) == (8192, 256, 16 * MIB)
    assert plan.total == FIXED + 16 * MIB
    assert plan.context_note == "the model's own"
    assert "weights 100 MiB + KV 16 MiB (8,192 tokens × 2,048 B, f16)" in plan.explain()


def test_the_default_pool_is_a_quarter_of_what_is_available() -> None:
    """A page of 32 tokens has 64 KiB: 25 % of 1 GiB are 4,096 pages, which is as much as 16
    contexts of 256 pages.
    """
    gib = 1 << 30
    assert plan_memory(FOOTPRINT, config(), gib).n_pages == 4096
    assert plan_memory(FOOTPRINT, config(max_seqs=32), gib).n_pages == 4096
    assert plan_memory(FOOTPRINT, config(max_seqs=3), gib).n_pages == 3 * 256
    assert plan_memory(FOOTPRINT, config(max_seqs=3), gib).sequences == 3
    assert plan_memory(FOOTPRINT, config(max_context=64), gib).n_pages == 16 * 2
    # Never more than may be used: 7 MiB are 112 pages, and a context of 1,024 takes 32.
    tight = plan_memory(FOOTPRINT, config(max_context=1024), available_for(FIXED + 7 * MIB))
    assert (tight.n_pages, tight.context, tight.sequences) == (112, 1024, 3)


def test_f32_pages_are_twice_as_large() -> None:
    assert plan_memory(FOOTPRINT, config(kv_dtype="f32"), None).kv == 32 * MIB


def test_compressed_pages_count_their_scales() -> None:
    """A token's 16 heads (4 layers, 2 KV heads, K and V) of 64: q8 64 + 4 bytes each, q4 32 + 8 (a
    scale and a minimum, 2 bytes each, for 32 codes).
    """
    plan = plan_memory(FOOTPRINT, config(kv_dtype="q8", max_context=8192), None)
    assert (plan.kv_per_token, plan.recent) == (16 * 68, 0)
    plan = plan_memory(FOOTPRINT, config(kv_dtype="q4", max_context=8192), None)
    assert plan.kv_per_token == 16 * 40
    # Two groups of 64 tokens for each of 16 sequences and one more in all layers, and once the 512
    # tokens of a step.
    assert plan.recent == 2 * 64 * 17 * 2048 + 512 * 512
    assert plan.total == FIXED + plan.kv + plan.recent
    assert "recent KV 4 MiB" in plan.explain()


def test_types_by_layer() -> None:
    plan = plan_memory(FOOTPRINT, config(kv_dtype="q8,f16:1,f32:3", max_context=8192), None)
    assert plan.kv_per_token == 4 * (68 + 128 + 68 + 256)
    with pytest.raises(RequestError, match="layer 4, but the model has 4: 0 to 3"):
        plan_memory(FOOTPRINT, config(kv_dtype="q8,f16:4"), None)


def test_the_default_context_is_what_fits() -> None:
    """5 MiB hold 2,560 tokens of 2 KiB; one byte less holds a page less."""
    plan = plan_memory(FOOTPRINT, config(), available_for(FIXED + 5 * MIB))
    assert (plan.context, plan.context_note) == (2560, "what fits in memory")
    assert plan_memory(FOOTPRINT, config(), available_for(FIXED + 5 * MIB) - 2).context == 2528


def test_a_context_that_does_not_fit_is_refused_with_the_sum_and_the_fix() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_memory(FOOTPRINT, config(max_context=8192), available_for(FIXED + 5 * MIB))
    text = str(caught.value)
    assert "weights 100 MiB + KV 16 MiB" in text
    assert "11 MiB too much" in text
    assert "set max_context to 2,560 or less" in text


def test_f32_refusal_names_f16() -> None:
    with pytest.raises(CapacityError, match="set max_context to 1,280 or less, or use kv_dtype f16"):
        plan_memory(FOOTPRINT, config(max_context=8192, kv_dtype="f32"), available_for(FIXED + 5 * MIB))


def test_a_model_that_does_not_fit_at_all() -> None:
    with pytest.raises(CapacityError, match=r"no context fits.*choose a smaller model"):
        plan_memory(FOOTPRINT, config(), available_for(FIXED - MIB))


def test_a_context_beyond_the_models() -> None:
    with pytest.raises(RequestError, match=r"max_context is 8,193, but tiny was trained for 8,192") as caught:
        plan_memory(FOOTPRINT, config(max_context=8193), None)
    assert caught.value.param == "max_context"


def test_kv_memory_sets_the_pages_and_bounds_the_context() -> None:
    plan = plan_memory(FOOTPRINT, config(kv_memory=MIB), None)
    assert (plan.n_pages, plan.context, plan.context_note) == (16, 512, "what kv_memory holds")
    more = plan_memory(FOOTPRINT, config(kv_memory=64 * MIB), None)
    assert (more.n_pages, more.context) == (1024, 8192)


@pytest.mark.parametrize("kv_memory", [MIB, 1])
def test_kv_memory_too_small_for_the_context(kv_memory: int) -> None:
    with pytest.raises(
        CapacityError, match=r"a context of 1,024 needs 2,097,152 bytes: raise kv_memory or lower max_context"
    ):
        plan_memory(FOOTPRINT, config(kv_memory=kv_memory, max_context=1024), None)


def test_kv_memory_below_a_page() -> None:
    with pytest.raises(CapacityError, match="raise kv_memory"):
        plan_memory(FOOTPRINT, config(kv_memory=1000), None)


def test_kv_memory_that_is_not_there() -> None:
    """5 MiB are left for pages: 80 pages of 64 KiB."""
    with pytest.raises(CapacityError, match="lower kv_memory to 5,242,880 bytes or less"):
        plan_memory(FOOTPRINT, config(kv_memory=64 * MIB), available_for(FIXED + 5 * MIB))


def test_a_machine_that_does_not_say_gets_the_models_context() -> None:
    assert plan_memory(FOOTPRINT, config(), None).context == 8192


def test_a_context_that_is_no_multiple_of_the_page_has_a_whole_last_page() -> None:
    assert plan_memory(FOOTPRINT, config(max_context=100), None).n_pages == 4


def test_the_table_is_the_same_formula() -> None:
    rows = context_table(FOOTPRINT, config(), available_for(FIXED + 5 * MIB), [2048, 8192])
    assert [(row.context, row.kv_dtype, row.kv // MIB, row.fits) for row in rows] == [
        (2048, "f16", 4, True),
        (2048, "f32", 8, False),
        (2048, "q8", 2, True),
        (2048, "q4", 1, False),
        (8192, "f16", 16, False),
        (8192, "f32", 32, False),
        (8192, "q8", 8, False),
        (8192, "q4", 5, False),
    ]
    plan = plan_memory(FOOTPRINT, config(max_context=2048, max_seqs=1), available_for(FIXED + 5 * MIB))
    assert rows[0].total == plan.total


def test_the_table_has_sequences_and_its_bytes_are_what_the_allocator_takes() -> None:
    """Ask 8. A page is 32 tokens of 2 KiB (f16): 100 tokens take 4 pages, whoever they belong
    to.
    """
    rows = context_table(FOOTPRINT, config(), None, [100, 2048], [1, 3])
    found = [(row.context, row.sequences, row.kv_dtype, row.kv) for row in rows if row.kv_dtype == "f16"]
    page = 32 * rows[0].kv_per_token
    assert found == [
        (100, 1, "f16", 4 * page),
        (100, 3, "f16", 12 * page),
        (2048, 1, "f16", 64 * page),
        (2048, 3, "f16", 192 * page),
    ]
    for row in rows:
        changed = config(max_context=row.context, kv_memory=row.kv, kv_dtype=row.kv_dtype)
        plan = plan_memory(FOOTPRINT, changed, None)
        assert (plan.n_pages, plan.kv, plan.total) == (row.n_pages, row.kv, row.total)
        assert plan.sequences >= row.sequences  # whole pages may hold one more


@pytest.mark.parametrize(("vocab", "rows"), [(1000, 64), (151_936, 55), (262_144, 32), (4_000_000, 17)])
def test_logit_rows_are_bounded_in_bytes_but_serve_every_sequence(vocab: int, rows: int) -> None:
    limits = step_limits(config(max_seqs=16), vocab, 100)
    assert (limits.max_logits, limits.max_pages_per_seq, limits.max_tokens) == (rows, 4, 512)


def test_a_plan_is_frozen() -> None:
    plan = plan_memory(FOOTPRINT, config(), None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.weights = 0  # type: ignore[misc]
