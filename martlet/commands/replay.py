"""Run a capsule again and show every step.

A capsule is what `--capsule FILE` (or `LLM(…, capsule=FILE)`) wrote: requests and the schedule in
which they ran. The exit status is 0 if every token came out as recorded, else 1. Read
`observe/capsule_replay.py` next.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.commands.arguments import named
from martlet.errors import RequestError

if TYPE_CHECKING:
    from martlet.engine.build import Built
    from martlet.observe.capsule_replay import ReplayedStep
    from martlet.types import SeqId

MOST_NAMES = 6  # sequences that a line names


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("capsule", metavar="FILE", help="a capsule")
    parser.add_argument("--model", metavar="PATH", help="where the model's file is here (default: where it was)")
    parser.add_argument("--lora", dest="loras", action="append", type=named, metavar="NAME=PATH", help="where an adapter of"
                        " it is here (default: where it was); may be given several times")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="also with another model than the recorded one")
    parser.add_argument("-q", "--quiet", action="store_true", help="show the outcome only")
    parser.add_argument("--json", action="store_true", help="print one JSON object a step, and one of the outcome")


def execute(args: Namespace) -> int:
    from martlet.config import resolve_config
    from martlet.engine.build import build
    from martlet.observe.capsule import read_capsule
    from martlet.observe.capsule_replay import replay, replay_options, verdict

    capsule = read_capsule(args.capsule)
    with ExitStack() as resources:
        disk = resources.enter_context(tempfile.TemporaryDirectory(prefix="martlet-replay-"))
        options = replay_options(capsule, disk, dict(args.loras or ()))
        built = build(resolve_config({**options, "model": _model(args, capsule)}))
        resources.callback(built.close)
        _check_same(args, capsule, built)
        _check_adapters(capsule, built)
        schedule = _schedule(capsule, built)
        if not args.quiet and not args.json:
            _print_header(capsule)
        n_differ = 0
        for step in replay(capsule, built.engine.executor, schedule):
            n_differ += len(step.differ)
            if args.json:
                print(json.dumps(_as_json(step)))
            elif not args.quiet or step.differ:
                print(_line(step, built))
        said = verdict(capsule, n_differ, args.capsule)
        print(json.dumps({"differ": n_differ, "verdict": said}) if args.json else said)
    return 1 if n_differ else 0


def _model(args: Namespace, capsule: Mapping[str, Any]) -> str:
    path = args.model or capsule["model"].get("path")
    if not isinstance(path, str) or not Path(path).exists():
        raise RequestError(
            f"The model {capsule['model'].get('file')!r} of the capsule is not at {path!r}: say where it is with --model.",
            param="model",
        )
    return path


def _check_same(args: Namespace, capsule: Mapping[str, Any], built: Built) -> None:
    from martlet.observe.capsule_replay import differences

    grave, light = differences(capsule, built.header())
    for line in (*light, *(grave if args.force else ())):
        print(f"martlet: {line}", file=sys.stderr)
    if grave and not args.force:
        raise RequestError(
            f"The capsule is of something else: {'; '.join(grave)}. --force runs it anyway.", param="model"
        )


def _check_adapters(capsule: Mapping[str, Any], built: Built) -> None:
    """RequestError if requests ran with adapters that are missing: their tokens would differ."""
    from martlet.observe.capsule_replay import missing_adapters

    here = {adapter.digest: name for name, adapter in built.adapters.items()}
    missing = missing_adapters(capsule, here)
    if missing:
        then = capsule["settings"].get("lora") or "loaded while it ran"
        raise RequestError(
            f"Requests of the capsule ran with adapters that are not here, by their digests: {', '.join(missing)}. It had"
            f" {then}; here is {here or 'none'}. Say where they are with --lora NAME=PATH.",
            param="lora",
        )


def _schedule(capsule: Mapping[str, Any], built: Built) -> Any:
    from martlet.engine.memory import step_limits
    from martlet.kv_types import share_granularity
    from martlet.observe.capsule_replay import Schedule
    from martlet.runtime.plan_codec import PlanLimits

    plan = built.plan
    limits = step_limits(built.config, built.spec.vocab, plan.context)
    spec = built.spec
    bounds = (spec.vocab, plan.context, plan.n_pages, plan.page_size, len(spec.layers))
    adapters = frozenset(adapter.digest for adapter in built.adapters.values())
    held = PlanLimits(limits, *bounds, adapters, share_granularity(built.config.kv_dtype))
    return Schedule(capsule, held, built.tokenizer.eog_ids)


def _print_header(capsule: Mapping[str, Any]) -> None:
    print(f"{capsule['model'].get('file')}, version {capsule.get('version')}, {capsule['machine'].get('processor')}")
    print(", ".join(f"{name} {value}" for name, value in capsule["settings"].items() if value is not None))
    for request in capsule["requests"]:
        params = " ".join(f"{name}={value}" for name, value in request["params"].items())
        print(f"request {request['id']}, from step {request.get('step')}: {len(request['prompt_ids'])} tokens {params}")


def _line(step: ReplayedStep, built: Built) -> str:
    """`step 7: 3 sequences, 515 rows: 0: 0+512, 1: 44+1 → ' the', …`, and what differs."""
    came: dict[SeqId, list[int]] = {}
    for seq, token_id in step.came:
        came.setdefault(seq, []).append(token_id)
    differ = {seq: then for seq, _, then in step.differ}
    sequences = []
    for span in step.plan.spans[:MOST_NAMES]:
        shown = f"{_name(step, span.seq)}: {span.place}"
        if span.seq in came:
            shown += f" → {_text(built, *came[span.seq])}"
        if span.seq in differ:
            then = differ[span.seq]
            shown += f" BUT RECORDED {'nothing' if then is None else _text(built, then)}"
        sequences.append(shown)
    if len(step.plan.spans) > MOST_NAMES:
        sequences.append("…")
    plan = step.plan
    notes = [f"{_name(step, seq)} preempted" for seq in plan.preempted]
    notes += [f"{len(rows)} {what}" for what, rows in (("saves", plan.saves), ("loads", plan.loads), ("copies", plan.copies)) if rows]  # fmt: skip
    notes += [f"{_name(step, new.seq)} from {first}" for new in plan.added if (first := _first(plan, new.seq))]
    if step.error:
        notes.append(f"failed: {step.error}")
    return f"step {plan.step}: {sum(span.count for span in plan.spans)} rows; {', '.join(sequences)}" + "".join(
        f" [{note}]" for note in notes
    )


def _first(plan: Any, seq: int) -> int:
    """Where a sequence's first span starts: what is before comes from the prefix cache."""
    return next((int(span.start) for span in plan.spans if span.seq == seq), 0)


def _text(built: Built, *ids: int) -> str:
    return repr(built.tokenizer.decode(ids, skip_special=False))


def _name(step: ReplayedStep, seq: SeqId) -> str:
    request_id, index = step.names.get(seq, (f"#{seq}", 0))
    return f"{request_id}[{index}]" if index else request_id


def _as_json(step: ReplayedStep) -> dict[str, Any]:
    return {
        "step": step.plan.step,
        "spans": [[*step.names[s.seq], s.start, s.count] for s in step.plan.spans],
        "tokens": [[*step.names[seq], token_id] for seq, token_id in step.came],
        "differ": [[*step.names[seq], now, then] for seq, now, then in step.differ],
        "error": step.error,
    }
