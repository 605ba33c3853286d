"""`martlet bench`: the speed of one request, and workloads of many (read `workload.py` next).

`bench MODEL` (or `bench speed MODEL`) measures as llama-bench does; the workloads are in
`workload.py`. Prefill: `-p` tokens from an empty cache. Decode: `-n` tokens, one a step, after
`--depth` tokens that are not counted. Each is run once for warmth, then `-r` times; the median
counts. Tokens are random, since no kernel's speed depends on them.
"""

from __future__ import annotations

import json
import random
import statistics
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from martlet.commands.arguments import add_engine_options, add_watch_options, open_llm
from martlet.commands.speed import bytes_per_token, read_bandwidth
from martlet.commands.workload import KINDS, WORKLOAD_OPTIONS, add_workload_options, execute_workload, refuse_unused
from martlet.errors import RequestError, nearest
from martlet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from martlet.llm import LLM

SPEED = {"prompt_tokens": 512, "gen_tokens": 64, "depth": 128, "repetitions": 3}


def add_arguments(parser: ArgumentParser) -> None:
    kinds = ", ".join(KINDS)
    parser.add_argument("what", nargs="+", metavar="[KIND] MODEL", help=f"{kinds} (default: speed), and a model")
    parser.add_argument("-p", "--prompt-tokens", type=int, metavar="N", help="tokens of a prompt (0: no prefill)")
    parser.add_argument("-n", "--gen-tokens", type=int, metavar="N", help="tokens of an answer (0: no decode)")
    group = parser.add_argument_group("speed (by default -p 512 -n 64)")
    group.add_argument("-d", "--depth", type=int, metavar="N", help="tokens before the decode (default: 128)")
    group.add_argument(
        "-r", "--repetitions", type=int, metavar="N", help="runs, of which the median counts (default: 3)"
    )
    add_workload_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser, context="what the test takes")
    add_watch_options(parser)


def execute(args: Namespace) -> int:
    args.kind, args.model = _kind_and_model(args.what)
    if args.kind != "speed":
        return execute_workload(args)
    refuse_unused(args, WORKLOAD_OPTIONS)
    for name, default in SPEED.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name, least in (("prompt_tokens", 0), ("gen_tokens", 0), ("depth", 1), ("repetitions", 1)):
        if getattr(args, name) < least:
            raise RequestError(f"{name} is {getattr(args, name)}; expected {least} or more.", param=name)
    needed = max(args.prompt_tokens + 1, args.depth + args.gen_tokens + 1)
    if args.max_context is not None and args.max_context < needed:
        raise RequestError(f"--context is {args.max_context}, but the test takes {needed} positions.", param="context")
    # random text repeats itself: what guessing it gives says nothing
    args.draft = args.draft or "off"
    with open_llm(args, max_context=args.max_context or needed) as llm:
        report = _measure(llm, args)
    print(json.dumps(report) if args.json else _table(report))
    return 0


def _kind_and_model(words: list[str]) -> tuple[str, str]:
    """A model may have a kind's name as a path: ./speed."""
    if len(words) == 1 and words[0] not in KINDS:
        return "speed", words[0]
    if len(words) != 2 or words[0] not in KINDS:
        hint = nearest(words[0], KINDS) if len(words) == 2 else ""
        raise RequestError(
            f"bench got {' '.join(words)!r}; expected one of {', '.join(KINDS)}, and a model.{hint}", param="what"
        )
    return words[0], words[1]


def _measure(llm: LLM, args: Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {
        "model": llm.config.model,
        "threads": llm.config.threads,
        "kv_dtype": llm.config.kv_dtype,
        "weight_bytes": llm.plan.weights,
        "kv_bytes": llm.plan.kv,
    }
    rounds = range(args.repetitions + 1)
    if args.prompt_tokens:
        rates = [_prefill(llm, args.prompt_tokens, seed) for seed in rounds][1:]
        report["prefill"] = {"tokens": args.prompt_tokens, "runs": rates, "tokens_per_s": statistics.median(rates)}
    if args.gen_tokens:
        rates = [_decode(llm, args.depth, args.gen_tokens, seed) for seed in rounds][1:]
        rate = statistics.median(rates)
        read = rate * bytes_per_token(llm, args.depth + args.gen_tokens // 2)
        speed = read_bandwidth(llm.config.threads)
        report["decode"] = {"tokens": args.gen_tokens, "depth": args.depth, "runs": rates, "tokens_per_s": rate}
        report["roofline"] = {"bytes_read_per_s": read, "memory_bytes_per_s": speed, "share": read / speed}
    return report


def _prefill(llm: LLM, count: int, seed: int) -> float:
    [output] = llm.generate({"prompt_token_ids": _random_ids(llm, count, seed)}, _params(1))
    assert output.metrics is not None
    assert output.metrics.prefill_tokens_per_s is not None
    return output.metrics.prefill_tokens_per_s


def _decode(llm: LLM, depth: int, count: int, seed: int) -> float:
    """Tokens/s of `count` decode steps; the first token comes with the prefill and is left out."""
    [output] = llm.generate({"prompt_token_ids": _random_ids(llm, depth, seed)}, _params(count + 1))
    assert output.metrics is not None
    assert output.metrics.decode_tokens_per_s is not None
    return output.metrics.decode_tokens_per_s


def _random_ids(llm: LLM, count: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(llm.get_tokenizer().vocab_size) for _ in range(count)]


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['model']}, {report['threads']} threads, KV {report['kv_dtype']}"]
    for name in ("prefill", "decode"):
        if name in report:
            section = report[name]
            after = f" after {section['depth']}" if "depth" in section else ""
            spread = f"{min(section['runs']):,.1f} to {max(section['runs']):,.1f}"
            lines.append(
                f"{name:<8} {section['tokens']:>5} tokens{after}: {section['tokens_per_s']:>9,.1f} tok/s ({spread})"
            )
    if "roofline" in report:
        roof = report["roofline"]
        lines.append(
            f"decode reads {roof['bytes_read_per_s'] / 1e9:.1f} GB/s: {roof['share']:.0%} of the"
            f" {roof['memory_bytes_per_s'] / 1e9:.1f} GB/s that these threads read from memory"
        )
    return "\n".join(lines)
