"""Rotary frequencies with every published scaling rule applied (read `formats/checkpoint.py` next).

A kernel sees only numbers (`spec.Rope`). Rules:

plain     1 / base^(2i/d)                                           arXiv:2104.09864
linear    divided by the factor                                     arXiv:2306.15595
llama3    long wavelengths divided, short ones kept, a blend between      (Llama 3.1's own code)
yarn      the same idea with a ramp over dimensions, and a magnitude      arXiv:2309.00071
longrope  each divided by its own factor of the short or the long set     arXiv:2402.13753
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from martlet.errors import UnsupportedError
from martlet.models.metadata import ModelMeta
from martlet.spec import Rope

Scaled = tuple[list[float], float]  # frequencies, magnitude


def rope_of(meta: ModelMeta, context: int | None = None, *, base: float | None = None, scaled: bool = True) -> Rope:
    """The model's rotary embedding, scaled unless `scaled` is False.

    `context` is the longest one in use, in tokens; `base` replaces the file's. Raises
    UnsupportedError for an unknown scaling rule.
    """
    base = meta.rope_base if base is None else base
    dims = meta.rope_dims
    plain = [base ** (-i / dims) for i in range(0, dims, 2)]
    if not scaled:
        return Rope(dims, tuple(plain))
    if meta.rope_divisors is not None:
        plain = [f / d for f, d in zip(plain, meta.rope_divisors, strict=True)]
    rule = meta.rope_scaling.get("type", "default")
    if rule not in RULES:
        raise UnsupportedError(f"the RoPE scaling {rule!r}", RULES)
    frequencies, magnitude = RULES[rule](plain, meta, base, context)
    return Rope(dims, tuple(frequencies), magnitude)


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UnsupportedError(f"RoPE scaling with {key} = {value!r}; expected a number above 0")
    return float(value)


def _linear(plain: list[float], meta: ModelMeta, base: float, context: int | None) -> Scaled:
    factor = _number(meta.rope_scaling, "factor")
    return [f / factor for f in plain], 1.0


def _llama3(plain: list[float], meta: ModelMeta, base: float, context: int | None) -> Scaled:
    s = meta.rope_scaling
    factor, low, high = _number(s, "factor"), _number(s, "low_freq_factor"), _number(s, "high_freq_factor")
    original = _number(s, "original_max_position_embeddings")

    def scale(f: float) -> float:
        wavelength = 2 * math.pi / f
        if wavelength > original / low:
            return f / factor
        if wavelength < original / high:
            return f
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * f / factor + smooth * f

    return [scale(f) for f in plain], 1.0


def _yarn(plain: list[float], meta: ModelMeta, base: float, context: int | None) -> Scaled:
    s, dims = meta.rope_scaling, meta.rope_dims
    factor = _number(s, "factor")
    original = _number(s, "original_max_position_embeddings", meta.context)
    fast, slow = _number(s, "beta_fast", 32.0), _number(s, "beta_slow", 1.0)

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(fast), dimension(slow)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    span = max(high - low, 0.001)

    def scale(i: int, f: float) -> float:
        ramp = min(max((i - low) / span, 0.0), 1.0)
        return f / factor * ramp + f * (1 - ramp)

    magnitude = _number(s, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return [scale(i, f) for i, f in enumerate(plain)], magnitude


def _longrope(plain: list[float], meta: ModelMeta, base: float, context: int | None) -> Scaled:
    s = meta.rope_scaling
    original = _number(s, "original_max_position_embeddings", meta.context)
    which = "long_factor" if (context or meta.context) > original else "short_factor"
    factors = s.get(which)
    if not isinstance(factors, list) or len(factors) != len(plain):
        raise UnsupportedError(f"longrope whose {which} is not a list of {len(plain)} numbers")
    stretch = meta.context / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return [f / float(d) for f, d in zip(plain, factors, strict=True)], _number(s, "attention_factor", usual)


def _plain(plain: list[float], meta: ModelMeta, base: float, context: int | None) -> Scaled:
    return plain, 1.0


RULES: dict[str, Callable[[list[float], ModelMeta, float, int | None], Scaled]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
