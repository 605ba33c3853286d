"""Show what a compressed KV cache costs in quality, on your own text and by context depth.

For each KV type: Kullback-Leibler divergence from the base type's distributions, how often the best
token is the same, and perplexity. `--layers` measures each layer alone; `--guard KLD` then chooses
a type for each layer under a limit.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from martlet.commands.arguments import MODEL_HELP, add_engine_options, engine_options
from martlet.commands.common import read_file, resolve_model
from martlet.commands.perplexity import windows
from martlet.config import resolve_config
from martlet.engine.build import load_tokenizer
from martlet.errors import RequestError
from martlet.formats.checkpoint import open_checkpoint
from martlet.kv_types import LARGEST_KEY_BIAS, KvTypes, parse_kv_types
from martlet.models.weights import load_model, outlier_key_layers
from martlet.observe.kv_quality import Compared, KvLens, compare, guard_types, join
from martlet.ops.backends import make_backend
from martlet.runtime.kv import kv_bytes_per_token, layer_types
from martlet.spec import ModelSpec

DEFAULT_CONTEXT = 2048
FIRST_DEPTH = 128
LAYER_TOKENS = 512  # of the text, for each layer alone: there are dozens of layers
THIN = 64  # heads of fewer dimensions lose more: fewer values share the error of a code
BAD_LAYER = 4.0  # a layer is bad if its divergence is so many times the median
LOST = 0.1  # a mean divergence above which answers are visibly others


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("file", help='the text, UTF-8; "-" reads stdin')
    parser.add_argument("--against", default="f16", metavar="TYPE", help="the base KV type (default: f16)")
    parser.add_argument("--chunks", type=int, default=4, metavar="N", help="windows of text, at most (default: 4)")
    parser.add_argument(
        "--layers", action="store_true", help=f"measure each layer alone as well, on {LAYER_TOKENS} tokens"
    )
    parser.add_argument(
        "--guard", type=float, metavar="KLD", help="choose a type for each layer so that the divergence is at most this"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser, context=f"windows of {DEFAULT_CONTEXT}")


def execute(args: Namespace) -> int:
    if args.guard is not None and not args.guard > 0:
        raise RequestError(f"guard is {args.guard}; expected a divergence above 0, such as 0.01.", param="guard")
    if args.chunks < 1:
        raise RequestError(f"chunks is {args.chunks}; expected 1 or more.", param="chunks")
    text = read_file(args.file)
    path = resolve_model(args.model, args.offline)
    config = resolve_config({"model": path, **engine_options(args)})
    base = parse_kv_types(args.against)
    listed = [parse_kv_types(name) for name in ([args.kv_dtype] if args.kv_dtype else ["q8", "q4"])]
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint, config)
        ids = tokenizer.encode(text)
        size = min(config.max_context or DEFAULT_CONTEXT, len(ids))
        if size < 2:
            raise RequestError("The text has fewer than two tokens.", param="file")
        ops = make_backend(config)
        try:
            model = load_model(checkpoint, ops, context=size)
            size = min(size, model.spec.context)
            for types in (base, *listed):
                layer_types(model.spec, types)  # refuses layers that are not there
            texts = list(windows(ids, size, tokenizer.bos_id if tokenizer.add_bos else None))[: args.chunks]
            lens, outliers = KvLens(ops, model, size), outlier_key_layers(checkpoint, model.spec, LARGEST_KEY_BIAS)
            check = _Check(lens, model.spec, base, outliers, texts, quiet=args.json)
            results = [check.result(types) for types in listed]
            if args.layers or args.guard is not None:
                results = [check.with_layers(entry, args.guard) for entry in results]
        finally:
            ops.close()
    notes = [note for entry in results for note in warnings_of(model.spec, entry)]
    if args.json:
        print(json.dumps({"base": str(base), "tokens": len(texts) * size, "types": results, "warnings": notes}))
    else:
        print("\n\n".join(_table(entry, base) for entry in results))
        for note in notes:
            print(f"martlet: {note}", file=sys.stderr)
    return 0


class _Check:
    """Measures KV types against `base` on the same texts."""

    def __init__(
        self,
        lens: KvLens,
        spec: ModelSpec,
        base: KvTypes,
        outliers: Sequence[int],
        texts: Sequence[list[int]],
        *,
        quiet: bool,
    ) -> None:
        self._lens, self._spec, self._base, self._outliers, self._texts = lens, spec, base, outliers, texts
        self._quiet = quiet

    def result(self, types: KvTypes) -> dict[str, Any]:
        """The whole and each depth, in numbers."""
        windows_compared = []
        for number, text in enumerate(self._texts, 1):
            self._say(f"{types}: window {number} of {len(self._texts)}")
            windows_compared.append(compare(self._lens, self._base, types, text))
        compared = join(windows_compared)
        depths, first, stop = [], 0, FIRST_DEPTH
        while first < len(self._texts[0]) - 1:
            depths.append({"from": first, "to": stop, **_numbers(compared.between(first, stop))})
            first, stop = stop, 2 * stop
        bytes_, base_bytes = (kv_bytes_per_token(self._spec, t) for t in (types, self._base))
        return {
            "kv_dtype": str(types),
            "bytes_per_token": bytes_,
            "memory": bytes_ / base_bytes,
            **_numbers(compared),
            "depths": depths,
        }

    def with_layers(self, entry: dict[str, Any], guard: float | None) -> dict[str, Any]:
        """Add each layer's own divergence, and what the guard chooses."""
        types, costs = parse_kv_types(entry["kv_dtype"]), []
        for layer in range(self._lens.n_layers):
            self._say(f"{types}: layer {layer + 1} of {self._lens.n_layers}")
            alone = KvTypes(self._base.usual, {**self._base.layers, layer: types.of(layer).name})
            costs.append(self._mean(alone, [self._texts[0][:LAYER_TOKENS]]))
        added: dict[str, Any] = {"layers": costs}
        if guard is not None:
            chosen, kld = guard_types(
                types, self._base, self._outliers, lambda: costs, guard, lambda types_: self._mean(types_, self._texts)
            )
            added["guard"] = {
                "limit": guard,
                "kv_dtype": str(chosen.simplest(self._lens.n_layers, self._outliers)),
                "kld": kld,
                "bytes_per_token": kv_bytes_per_token(self._spec, chosen),
            }
        return {**entry, **added}

    def _mean(self, types: KvTypes, texts: Sequence[list[int]]) -> float:
        self._say(f"measuring {types}")
        return float(join([compare(self._lens, self._base, types, text) for text in texts]).kld.mean())

    def _say(self, what: str) -> None:
        if not self._quiet and sys.stderr.isatty():
            print(f"\r{what}\x1b[K", end="", file=sys.stderr, flush=True)


def _numbers(compared: Compared) -> dict[str, float]:
    first, second = compared.perplexities
    return {
        "tokens": len(compared.kld),
        "kld": float(compared.kld.mean()),
        "kld_p99": float(np.quantile(compared.kld, 0.99)),
        "same_best": float(compared.agree.mean()),
        "perplexity": second,
        "perplexity_rise": second / first - 1,
    }


def warnings_of(spec: ModelSpec, entry: dict[str, Any]) -> list[str]:
    """What a user should know of one type's result."""
    name, notes = entry["kv_dtype"], []
    thin = min(layer.mixer.head_dim for layer in spec.layers)
    if thin < THIN and name != "f16":
        notes.append(f"{name}: this model's heads have {thin} dimensions; thin heads lose more by compression.")
    if entry["kld"] > LOST:
        notes.append(f"{name}: a mean divergence of {entry['kld']:.3f} changes answers; use q8 or f16.")
    costs = entry.get("layers", [])
    usual = float(np.median(costs)) if costs else 0.0
    bad = [layer for layer, cost in enumerate(costs) if cost > BAD_LAYER * usual]
    if bad:
        suggestion = KvTypes(name.partition(",")[0], dict.fromkeys(bad, "q8" if name.startswith("q4") else "f16"))
        notes.append(
            f"{name}: layers {', '.join(map(str, bad))} lose more than {BAD_LAYER:g} times what layers usually do; try"
            f" --kv-dtype {suggestion}."
        )
    guard = entry.get("guard")
    if guard and guard["kld"] > guard["limit"]:
        notes.append(f"{name}: no choice of types keeps the divergence within {guard['limit']:g}.")
    return notes


def _table(entry: dict[str, Any], base: KvTypes) -> str:
    lines = [
        f"{entry['kv_dtype']} against {base}: {entry['bytes_per_token']:,} B a token, {entry['memory']:.1%} of {base}",
        "",
        f"{'depth':>13} {'tokens':>7} {'mean KLD':>9} {'p99 KLD':>9} {'same best':>9} {'perplexity':>11} {'rise':>8}",
    ]
    rows = [*((f"{d['from']:,} … {d['to'] - 1:,}", d) for d in entry["depths"]), ("all", entry)]
    lines += [
        f"{name:>13} {d['tokens']:>7,} {d['kld']:>9.5f} {d['kld_p99']:>9.4f} {d['same_best']:>9.2%}"
        f" {d['perplexity']:>11.4f} {d['perplexity_rise']:>+8.2%}"
        for name, d in rows
    ]
    if "layers" in entry:
        worst = sorted(enumerate(entry["layers"]), key=lambda pair: -pair[1])[:8]
        lines += ["", "layers that lose most: " + ", ".join(f"{layer} ({cost:.5f})" for layer, cost in worst)]
    if "guard" in entry:
        guard = entry["guard"]
        lines += [
            f"guard {guard['limit']:g}: --kv-dtype {guard['kv_dtype']} has KLD {guard['kld']:.5f},"
            f" {guard['bytes_per_token']:,} B a token"
        ]
    return "\n".join(lines)
