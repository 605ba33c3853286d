"""`martlet bench serve`: load on a server with OpenAI's API (read `bench/load_generator.py` next).

`martlet bench serve URL`: a closed loop of `--concurrency` clients, or with `--rate` an open loop
of random arrivals. The report audits itself: it says what would make its figures flatter.
"""

import json
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from martlet.bench.http_stream import Target
from martlet.bench.load_generator import Load, measure_server, read_dataset
from martlet.bench.load_report import load_chart, load_compare, load_summary, load_table, read_slo
from martlet.config import environment_api_keys
from martlet.errors import RequestError

LEAST = {"requests": 1, "concurrency": 0, "prompt_tokens": 1, "gen_tokens": 1, "shared_tokens": 0, "groups": 1,
         "vocab": 0, "warmup": 0}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    default = Load()
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="the model to ask for (default: the first that it lists)")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default=default.endpoint,
                        help=f"of the API (default: {default.endpoint})")  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: MARTLET_API_KEY)")
    group = parser.add_argument_group("when")
    group.add_argument("--requests", type=int, metavar="N", help=f"how many (default: {default.requests})")
    group.add_argument("--concurrency", type=int, metavar="N", help=f"clients, each with one request at a time (default:"
                       f" {default.concurrency}); with --rate the most that are open (default: 0, no bound)")  # fmt: skip
    group.add_argument("--rate", type=float, metavar="X", help="arrivals a second, at random")
    group.add_argument(
        "--warmup", type=int, metavar="N", help=f"requests first, not counted (default: {default.warmup})"
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a request (default: 600)")
    group = parser.add_argument_group("what")
    group.add_argument("-p", "--prompt-tokens", type=int, metavar="N", help=f"words, or ids with --vocab, of a prompt"
                       f" (default: {default.prompt_tokens})")  # fmt: skip
    group.add_argument("-n", "--gen-tokens", type=int, metavar="N", help=f"tokens of an answer (default:"
                       f" {default.gen_tokens})")  # fmt: skip
    group.add_argument(
        "--shared", dest="shared_tokens", type=int, metavar="N", help="more that prompts begin with alike"
    )
    group.add_argument("--groups", type=int, metavar="N", help="different such beginnings (default: 1)")
    group.add_argument("--vocab", type=int, metavar="N", help="prompts are random token ids below N, in place of words")
    group.add_argument("--dataset", metavar="FILE", help="prompts from a file: JSON lines or a list of objects with prompt,"
                       " messages or conversations (ShareGPT)")  # fmt: skip
    group.add_argument("--ignore-eos", action=BooleanOptionalAction, default=True, help="ask for answers of full length"
                       " (default: yes; not every server knows the field)")  # fmt: skip
    group.add_argument("--body", metavar="JSON", help="fields that every request has as well")
    group.add_argument("--seed", type=int, metavar="N", help="of prompts and arrivals (default: 0)")
    group = parser.add_argument_group("the report")
    group.add_argument("--slo", default="", metavar="LIMITS", help="count requests within limits: ttft=500,tpot=50,itl=200,"
                       "e2e=5000, in milliseconds, any of them")  # fmt: skip
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--out", metavar="PREFIX", help="write PREFIX.json and the chart PREFIX.svg")
    group.add_argument("--compare", metavar="FILE", help="compare with a report that --out wrote")


def execute(args: Namespace) -> int:
    """Run the command; status 1 if any request failed."""
    load, slo = _load(args), read_slo(args.slo)
    if args.out is not None and not Path(args.out).absolute().parent.is_dir():
        raise RequestError(f"--out is {args.out}, and its folder does not exist: make it first.", param="out")
    earlier = None if args.compare is None else _read_report(Path(args.compare))
    extra = _extra(args.body)
    prompts = [] if args.dataset is None else read_dataset(Path(args.dataset), load.endpoint)
    target = Target.of(args.url, args.api_key or next(iter(environment_api_keys()), None))
    model, run = measure_server(target, args.model, load, (extra, prompts), args.timeout)
    server = {"url": args.url, "model": model, "dataset": args.dataset, "body": extra}
    report = load_summary(load, run, slo, server)
    print(json.dumps(report) if args.json else load_table(report))
    if args.out is not None:
        Path(f"{args.out}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        Path(f"{args.out}.svg").write_text(load_chart(run), encoding="utf-8")
    if earlier is not None:
        text = load_compare(json.loads(json.dumps(report)), earlier, args.compare)
        print(text, file=sys.stderr if args.json else sys.stdout)
    return 1 if report["failed"] else 0


def _load(args: Namespace) -> Load:
    names = ("requests", "concurrency", "rate", "prompt_tokens", "gen_tokens", "shared_tokens", "groups", "vocab", "seed",
             "warmup", "endpoint", "ignore_eos")  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.rate is not None and not 0.001 <= args.rate <= 1e6:
        raise RequestError(f"--rate is {args.rate}; expected arrivals a second, from 0.001 to 1,000,000.", param="rate")
    if args.rate is not None:
        given.setdefault("concurrency", 0)
    for name, least in LEAST.items():
        least = 1 if name == "concurrency" and args.rate is None else least
        if given.get(name, least) < least:
            raise RequestError(f"{name} is {given[name]}; expected {least} or more.", param=name)
    if args.vocab and args.endpoint == "chat":
        raise RequestError("--vocab makes prompts of ids, which a chat cannot have; leave it out.", param="vocab")
    if args.dataset is not None and (unused := [n for n in ("prompt_tokens", "shared_tokens", "groups", "vocab")
                                                if getattr(args, n) is not None]):  # fmt: skip
        raise RequestError(f"{unused[0]} is of no use with --dataset, which has the prompts.", param=unused[0])
    return Load(**given)


def _extra(text: str | None) -> dict[str, Any]:
    try:
        fields = {} if text is None else json.loads(text)
    except ValueError as error:
        raise RequestError(f"--body is not JSON: {error}.", param="body") from None
    if not isinstance(fields, dict):
        raise RequestError("--body must be a JSON object.", param="body")
    return fields


def _read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict) or not isinstance(report.get("server"), dict) or "workload" not in report:
        raise RequestError(f"{path} is not a report that --out wrote.", param="compare")
    return report
