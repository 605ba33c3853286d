"""The sampling parameters in effect, with the origin of each (read `sampling_params.py` next).

A model's file may suggest parameters (generation_config.json). They apply where a request leaves a
field open, and never silently: every answer carries its effective settings with their origins.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from martlet.config import Origin, Setting
from martlet.errors import RequestError
from martlet.options import options_of
from martlet.sample.random import SeedSource
from martlet.sampling_params import SamplingParams

ParamsLike = SamplingParams | Mapping[str, Any] | None

_SUGGESTIBLE = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_NAMES = tuple(options_of(SamplingParams))


def resolve_params(given: ParamsLike, suggested: Mapping[str, Any]) -> tuple[SamplingParams, tuple[Setting, ...]]:
    """Return the parameters of a request and their origins.

    A SamplingParams is complete: the model's suggestions do not apply. A mapping (or None) sets
    some fields, and the others take the model's suggestion or the default. Raises RequestError for
    an unknown field or a wrong value.
    """
    if isinstance(given, SamplingParams):
        params, defaults = given, SamplingParams()
        chosen = {name for name in _NAMES if getattr(given, name) != getattr(defaults, name)}
        suggested = {}
    else:
        own = {name: value for name, value in (given or {}).items() if value is not None}
        params, chosen = SamplingParams.from_dict({**suggested, **own}), set(own)
    settings = []
    for name in _NAMES:
        if name in chosen:
            origin = Origin.OPTION
        else:
            origin = Origin.MODEL_FILE if name in suggested else Origin.DEFAULT
        settings.append(Setting(name, getattr(params, name), origin))
    return params, tuple(settings)


def with_seed(
    params: SamplingParams, settings: tuple[Setting, ...], seeds: SeedSource
) -> tuple[SamplingParams, tuple[Setting, ...]]:
    """Draw a seed if the request samples without one, so that its answer can be repeated."""
    if params.seed is not None or params.greedy:
        return params, settings
    seed = seeds.draw()
    note = "from the system" if seeds.seed is None else "from the engine's seed"
    drawn = Setting("seed", seed, Origin.DRAWN, note)
    return replace(params, seed=seed), tuple(drawn if s.name == "seed" else s for s in settings)


def suggested_params(generation_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The suggestions of a generation_config.json, and a warning for each that cannot be used.

    Only the parameters that vLLM takes from it, and typical_p; do_sample = false means greedy.
    """
    suggested: dict[str, Any] = {}
    warnings: list[str] = []
    wanted = {name: generation_config[name] for name in _SUGGESTIBLE if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        wanted = {name: value for name, value in wanted.items() if name == "repetition_penalty"}
        wanted["temperature"] = 0.0
    for name, value in wanted.items():
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            warnings.append(f"The model's file suggests {name} = {value!r}, which is not used: {error}")
        else:
            suggested[name] = value
    return suggested, warnings
