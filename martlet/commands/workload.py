"""The part of `martlet bench` that runs many requests at once (read `bench/workloads.py` next).

Prints a table, or JSON; `--out PREFIX` writes PREFIX.json and the chart PREFIX.svg; `--compare
FILE` sets the report beside an earlier one and refuses if the two did not measure the same.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.bench.workloads import WORKLOADS, Workload, arrivals
from martlet.commands.arguments import engine_options, open_llm
from martlet.commands.common import resolve_model
from martlet.errors import RequestError

if TYPE_CHECKING:
    from martlet.llm import LLM

KINDS = ("speed", *WORKLOADS)
WORKLOAD_OPTIONS = ("requests", "concurrency", "rate", "intrusion", "shared", "seed", "out", "compare")
SPEED_OPTIONS = ("depth", "repetitions")
# options of some workloads
ONLY = {"rate": ("latency",), "intrusion": ("latency",), "shared": ("prefix",)}


def add_workload_options(parser: ArgumentParser) -> None:
    """The options of the workloads."""
    group = parser.add_argument_group("throughput, latency, prefix")
    group.add_argument("--requests", type=int, metavar="N", help="requests (default: 64; latency and prefix: 32)")
    group.add_argument("--concurrency", type=int, metavar="N", help="running at a time (default: 16; prefix: 8)")
    group.add_argument("--rate", type=float, metavar="X", help="latency: arrivals a second (default: 2)")
    group.add_argument("--intrusion", type=int, metavar="N", help="latency: a prompt of N tokens arrives midway")
    group.add_argument("--shared", type=int, metavar="N", help="prefix: tokens that all prompts share (default: 1,000)")
    group.add_argument("--seed", type=int, metavar="N", help="of the workload (default: 0)")
    group.add_argument("--out", metavar="PREFIX", help="write PREFIX.json and PREFIX.svg")
    group.add_argument("--compare", metavar="FILE", help="compare with a report that --out wrote")


def refuse_unused(args: Namespace, names: Iterable[str]) -> None:
    """Raise RequestError for options of another benchmark, which would be ignored."""
    for name in names:
        if getattr(args, name) is not None:
            raise RequestError(f"--{name} is of no use for bench {args.kind}; leave it out.", param=name)


def execute_workload(args: Namespace) -> int:
    """Run one workload and report."""
    from martlet.bench.drive import drive
    from martlet.bench.report import chart, compare, summary, table

    workload = _workload(args)
    if args.out is not None and not Path(args.out).absolute().parent.is_dir():
        raise RequestError(f"--out is {args.out}, and its folder does not exist: make it first.", param="out")
    earlier = None if args.compare is None else _read_report(Path(args.compare))
    context = args.max_context or workload.longest
    if context < workload.longest:
        raise RequestError(
            f"--context is {context}, but the longest request takes {workload.longest} positions.", param="context"
        )
    sizes: dict[str, Any] = {"max_context": context, "max_seqs": workload.concurrency}
    # random text repeats itself: what guessing it gives says nothing
    args.draft = args.draft or "off"
    with open_llm(args, **sizes, **_kv_memory(args, context, workload)) as llm:
        requests = arrivals(workload, llm.get_tokenizer().vocab_size)
        run = drive(llm.engine, requests, workload.concurrency)
        report = summary(workload, run, _model(llm), _settings(llm))
        picture = chart(workload, run)
    print(json.dumps(report) if args.json else table(report))
    if args.out is not None:
        Path(f"{args.out}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        Path(f"{args.out}.svg").write_text(picture, encoding="utf-8")
    if earlier is not None:
        text = compare(json.loads(json.dumps(report)), earlier, args.compare)
        print(text, file=sys.stderr if args.json else sys.stdout)
    return 0


def _workload(args: Namespace) -> Workload:
    refuse_unused(args, SPEED_OPTIONS)
    refuse_unused(args, [name for name, kinds in ONLY.items() if args.kind not in kinds])
    defaults = WORKLOADS[args.kind]
    given = {
        "requests": args.requests,
        "concurrency": args.concurrency,
        "prompt_tokens": args.prompt_tokens,
        "gen_tokens": args.gen_tokens,
        "shared_tokens": args.shared,
        "rate": args.rate,
        "intrusion_tokens": args.intrusion,
        "seed": args.seed,
    }
    chosen: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    for name, value in chosen.items():
        least = 0 if name in ("seed", "shared_tokens", "intrusion_tokens") else 1
        if name == "rate":
            if not 0.001 <= value <= 1e6:
                raise RequestError(
                    f"--rate is {value}; expected arrivals a second, from 0.001 to 1,000,000.", param="rate"
                )
        elif value < least:
            raise RequestError(f"{name} is {value}; expected {least} or more.", param=name)
    return Workload(args.kind, **chosen)


def _kv_memory(args: Namespace, context: int, workload: Workload) -> dict[str, int]:
    """Pages for all concurrent requests, unless an option sets them: nothing is preempted."""
    options = engine_options(args)
    if options.get("kv_memory") is not None:
        return {}
    from martlet.config import resolve_config
    from martlet.engine.build import plan_for
    from martlet.formats.checkpoint import open_checkpoint

    given: dict[str, Any] = {**options, "model": resolve_model(args.model, args.offline), "max_context": context}
    config = resolve_config(given)
    with open_checkpoint(config.model) as checkpoint:
        plan = plan_for(checkpoint, config)
    spare = 2 * workload.concurrency + 2  # last pages that are not full, and one that grows
    tokens = max(workload.tokens_at_a_time, context) + spare * plan.page_size
    return {"kv_memory": -(-tokens // plan.page_size) * plan.page_size * plan.kv_per_token}


def _model(llm: LLM) -> dict[str, Any]:
    from martlet.formats.checkpoint import open_checkpoint

    with open_checkpoint(llm.config.model) as checkpoint:
        return {"file": Path(llm.config.model).name, "fingerprint": checkpoint.fingerprint()}


def _settings(llm: LLM) -> dict[str, Any]:
    """What makes two runs different beside the workload: every setting but where files are."""
    left_out = ("model", "trace", "capsule", "offline")
    return {setting.name: setting.value for setting in llm.config.settings() if setting.name not in left_out}


def _read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError):
        report = None
    if not isinstance(report, dict) or not isinstance(report.get("workload"), dict):
        raise RequestError(f"{path} is not a report that --out wrote.", param="compare")
    return report
