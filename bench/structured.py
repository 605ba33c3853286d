"""Structured output: what holding an answer to a schema costs, what forced text gives, and whether
answers are valid.

    python bench/structured.py MODEL speed [--out FILE.json]   a typical schema ÷ free, 1 and 16
    python bench/structured.py MODEL keys  [--out FILE.json]   a schema with long names ÷ free
    python bench/structured.py MODEL valid --schemas FILE.jsonl [--count 200] [--tokens 256]

Speed is measured in one run, alternating, tokens a second of the whole answers after the first
token; a figure is the ratio of the medians. `valid` generates at temperature 1, 16 at once, and
asks `jsonschema` (with its format checks) about every answer that came to its end; schemas that are
refused are counted, with the reason. A line of FILE.jsonl has a "schema".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from martlet import LLM, SamplingParams
from martlet.errors import MartletError

PROMPT = "Write a list of ten people who work in a small town, with what they do.\n"
TYPICAL = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 40},
            "age": {"type": "integer", "minimum": 18, "maximum": 99},
            "email": {"type": "string"},
            "job": {"enum": ["baker", "teacher", "doctor", "driver", "farmer"]},
            "skills": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 4},
        },
        "required": ["name", "age", "job", "skills"],
        "additionalProperties": False,
    },
}
_KEYS = (
    "customer_billing_address_line_one",
    "estimated_delivery_timestamp_utc",
    "preferred_communication_language",
    "total_amount_including_taxes",
)
LONG_KEYS = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {key: {"type": "integer", "minimum": 0, "maximum": 9999} for key in _KEYS},
        "required": list(_KEYS),
        "additionalProperties": False,
    },
}


def speed(llm: LLM, params: SamplingParams, n: int) -> float:
    """Tokens a second of n answers at once, after the first tokens."""
    answers = llm.generate([PROMPT + f"{number}." for number in range(n)], [params] * n)
    spans = [answer.metrics for answer in answers]
    assert all(span is not None for span in spans)
    tokens = sum(len(answer.outputs[0].token_ids) - 1 for answer in answers)
    first = max(span.first_token_s for span in spans if span is not None and span.first_token_s is not None)
    last = max(span.finished_s for span in spans if span is not None and span.finished_s is not None)
    return tokens / (last - first)


def ratio(llm: LLM, schema: dict[str, Any], n: int, rounds: int, tokens: int) -> dict[str, Any]:
    """The speed with a schema ÷ without, alternating; both go on to the same number of tokens."""
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    held = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, structured={"json": schema})
    speed(llm, held, n)  # masks and kernels are there, as in a server that runs
    speed(llm, free, n)
    found: dict[str, list[float]] = {"free": [], "held": []}
    for _ in range(rounds):
        found["free"].append(speed(llm, free, n))
        found["held"].append(speed(llm, held, n))
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"  {n:>2} at once: free {medians['free']:.1f} tokens/s, held {medians['held']:.1f}, ratio"
          f" {medians['held'] / medians['free']:.3f}", flush=True)  # fmt: skip
    return {"at_once": n, **found, "ratio": medians["held"] / medians["free"]}


def validity(llm: LLM, path: str, count: int, tokens: int) -> dict[str, Any]:
    """Generate under schemas and let jsonschema judge."""
    import jsonschema

    lines = Path(path).read_text(encoding="utf-8").splitlines()
    schemas = [json.loads(line)["schema"] for line in lines[:: max(1, len(lines) // count)]][:count]
    kept: list[Any] = []
    refused: list[str] = []
    asked: list[SamplingParams] = []
    for schema in schemas:
        try:
            params = SamplingParams(temperature=1.0, seed=len(kept), max_tokens=tokens, structured={"json": schema})
            assert llm._parts.grammars is not None
            if params.structured is not None:
                llm._parts.grammars.compile(params.structured)
        except MartletError as error:
            refused.append(str(error)[:200])
            continue
        kept.append(schema)
        asked.append(params)
    start, ended, wrong = time.perf_counter(), 0, []
    prompts = [f"Write an example in JSON for this schema:\n{json.dumps(schema)[:800]}\n" for schema in kept]
    for at in range(0, len(kept), 16):
        answers = llm.generate(prompts[at : at + 16], asked[at : at + 16])
        for schema, answer in zip(kept[at : at + 16], answers, strict=True):
            completion = answer.outputs[0]
            if completion.finish_reason != "stop":
                continue
            ended += 1
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            try:
                kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(completion.text))
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append({"schema": schema, "text": completion.text, "why": str(error)[:300]})
        print(f"  {min(at + 16, len(kept))} of {len(kept)}: {ended} ended, {len(wrong)} invalid", flush=True)
    return {
        "schemas": len(schemas),
        "refused": refused,
        "ended": ended,
        "invalid": wrong,
        "s": time.perf_counter() - start,
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", choices=("speed", "keys", "valid"))
    parser.add_argument("--schemas", help="lines of JSON, each with a schema")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--out")
    args = parser.parse_args()
    with LLM(args.model, max_context=2048) as llm:
        if args.what == "valid":
            if args.schemas is None:
                parser.error("valid needs --schemas")
            found: Any = validity(llm, args.schemas, args.count, args.tokens)
            print(f"{found['schemas']} schemas, {len(found['refused'])} refused, {found['ended']} answers ended,"
                  f" {len(found['invalid'])} of them invalid, {found['s']:.0f} s")  # fmt: skip
        else:
            schema = TYPICAL if args.what == "speed" else LONG_KEYS
            found = [ratio(llm, schema, n, args.rounds, args.tokens) for n in args.at_once]
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
