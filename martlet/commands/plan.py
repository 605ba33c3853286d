"""`martlet plan`: memory by context, sequences and KV type, and the speed to expect."""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict
from typing import Any

from martlet.bench.probe import probe
from martlet.commands.arguments import MODEL_HELP, add_engine_options, engine_options
from martlet.commands.common import resolve_model
from martlet.commands.speed import save_prediction
from martlet.config import EngineConfig, resolve_config
from martlet.engine.build import measure_for
from martlet.engine.memory import MemoryPlan, context_table
from martlet.formats.checkpoint import Checkpoint, open_checkpoint
from martlet.ops.backends import abilities_of

FIRST_CONTEXT = 2048
SEQUENCES = (1, 4, 16)
MAX_SEQUENCES = 1 << 16
TYPICAL_DEPTH = 256  # tokens in the cache, where the decode speed is predicted


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--no-probe", action="store_true", help="leave out the speed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sequences",
        type=_sequences,
        default=SEQUENCES,
        metavar="N,…",
        help="requests of a full context at once (default: 1,4,16)",
    )
    add_engine_options(parser)


def execute(args: Namespace) -> int:
    path = resolve_model(args.model, args.offline)
    config = resolve_config({"model": path, **engine_options(args)})
    with open_checkpoint(path) as checkpoint:
        footprint = measure_for(checkpoint, config)
        contexts = [config.max_context] if config.max_context else _contexts(footprint.spec.context)
        plans = context_table(footprint, config, abilities_of(config).memory_available(), contexts, args.sequences)
        speed = None if args.no_probe else _speed(checkpoint, config, plans[0])
    if args.json:
        rows = [{**asdict(plan), "total": plan.total, "fits": plan.fits} for plan in plans]
        print(json.dumps({"plans": rows, "speed": speed}))
    else:
        print(_table(plans))
        if speed:
            print(
                f"\nprobe of this machine, {config.threads} threads: {speed['bytes_per_s'] / 1e9:.1f} GB/s of weights,"
                f" {speed['macs_per_s'] / 1e9:.0f} G multiply-adds/s\n"
                f"expect prefill {speed['prefill_tokens_per_s']:,.0f} tok/s,"
                f" decode {speed['decode_tokens_per_s']:,.1f} tok/s after {TYPICAL_DEPTH} tokens"
            )
    return 0


def _sequences(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() and 1 <= int(number[:9]) <= MAX_SEQUENCES for number in numbers):
        raise ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to {MAX_SEQUENCES:,}")
    return tuple(map(int, numbers))


def _contexts(most: int) -> list[int]:
    """Powers of two from FIRST_CONTEXT up to the model's own."""
    contexts = []
    context = FIRST_CONTEXT
    while context < most:
        contexts.append(context)
        context *= 2
    return [*contexts, most]


def _speed(checkpoint: Checkpoint, config: EngineConfig, plan: MemoryPlan) -> dict[str, Any]:
    measured = probe(checkpoint, config)
    decode = measured.decode_tokens_per_s(plan.token_bytes + TYPICAL_DEPTH * plan.kv_per_token)
    save_prediction(config.model, config.threads, decode)
    return {
        "bytes_per_s": measured.bytes_per_s,
        "macs_per_s": measured.macs_per_s,
        "prefill_tokens_per_s": measured.prefill_tokens_per_s(),
        "decode_tokens_per_s": decode,
    }


def _table(plans: list[MemoryPlan]) -> str:
    plan = plans[0]
    mib = 1 << 20
    lines = [
        f"weights {plan.weights / mib:,.0f} MiB + activations {plan.activations / mib:,.0f} + logits"
        f" {plan.logits / mib:,.0f} + overhead {plan.overhead / mib:,.0f} = {plan.fixed / mib:,.0f} MiB, and KV:",
        "",
        f"{'context':>10} {'sequences':>9} {'KV type':>8} {'KV bytes':>16} {'total MiB':>10}  fits here",
    ]
    lines += [
        f"{p.context:>10,} {p.sequences:>9,} {p.kv_dtype:>8} {p.kv:>16,} {p.total / mib:>10,.0f}  {'yes' if p.fits else 'no'}"
        for p in plans
    ]
    lines += ["", "An engine's kv_memory is the column KV bytes; without it a quarter of the available memory."]
    return "\n".join(lines)
