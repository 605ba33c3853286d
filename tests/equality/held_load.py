"""Grammars for the requests of the equality matrix, each of another sort (read `matrix.py` next).

No grammar ends within a request's tokens, so a held request runs as long as the free request that
it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from martlet.types import Request

# A schema whose property names are forced, several tokens in a step.
HELD: Mapping[str, Any] = MappingProxyType(
    {
        "structured": {
            "json": {
                "type": "array",
                "minItems": 500,
                "items": {
                    "type": "object",
                    "properties": {
                        "direction": {"enum": ["north", "south"]},
                        "length": {"type": "integer", "maximum": 99},
                    },
                    "required": ["direction", "length"],
                    "additionalProperties": False,
                },
            }
        },
        "ignore_eos": False,
    }
)
# Nothing is forced: each token takes a step, so that several answers to a prompt run side by side.
HELD_SLOWLY: Mapping[str, Any] = MappingProxyType(
    {"structured": {"regex": "([a-m]|[n-z0-9]{2}){500}"}, "ignore_eos": False}
)
BEAM_FORM = {"regex": "((left|right) turn, ){50}"}
_STRINGS = {"type": "array", "minItems": 300, "items": {"type": "string", "minLength": 2}}
_FORMS: tuple[Mapping[str, Any], ...] = (
    {"json": _STRINGS, "string_limit": 9, "whitespace": "any"},  # strings end at their limit
    {"grammar": 'root ::= ("step " [0-9] " of " [0-9]{2} ": " ("stop" | "go on") "\\n"){200}'},
    HELD["structured"],
    {"grammar": 'start: pair ~ 200\npair: KEY "=" KEY ";"\nKEY: /[a-z]{3,5}/'},
    {
        "tags": [{"begin": "<call>", "schema": HELD["structured"]["json"], "end": "</call>"}],
        "at_least_one": True,
        "after": "</think>",
        "after_begin": "<think>",
    },
    HELD_SLOWLY["structured"],
)


def all_held(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Return the same requests, each held to a grammar."""
    return tuple(
        replace(request, params=replace(request.params, structured=form, ignore_eos=False))
        for request, form in zip(requests, _FORMS, strict=True)
    )
