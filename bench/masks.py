"""What a mask costs, and how much of real-world JSON Schema is right, beside `llguidance` in the
same run.

    python bench/masks.py MODEL.gguf SAMPLE.jsonl [--spacing compact] [--rounds 3] [--limit N]

SAMPLE.jsonl has an object a line: `id`, `schema`, `tests` (each `valid` and `data`), as MaskBench
(arXiv:2501.10868) has them. First every test is judged by both engines: a schema is right if all
its valid instances are accepted and all its invalid ones rejected. Then the valid instances are
written token by token, and each mask, each token taken and each compilation is timed, in processor
time of the thread, so that other load does not count; the engines take turns, schema by schema.
What an engine rejects is not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from martlet.config import cache_dir
from martlet.errors import MartletError
from martlet.formats.checkpoint import open_checkpoint
from martlet.grammar.json.prepare import warm
from martlet.grammar.json_schema import SchemaOptions, compile_schema
from martlet.grammar.vocabulary import Vocabulary
from martlet.ops.cpu.simd.isa import chosen_isa
from martlet.ops.cpu.store import KernelStore
from martlet.tokenizer.tokenizer import Tokenizer

SEPARATORS = {"compact": (",", ":"), "single": (", ", ": "), "any": (", ", ": ")}


@dataclass
class Score:
    """What one engine did."""

    right: int = 0
    refused: int = 0
    invalid: int = 0  # invalid instances of schemas that compiled
    accepted: int = 0  # of them
    rejected: int = 0  # valid instances
    masks: list[float] = field(default_factory=list)  # seconds, of the timed rounds
    first: list[float] = field(default_factory=list)  # compile and the first mask
    takes: list[float] = field(default_factory=list)


class Martlet:
    """This engine."""

    def __init__(self, tokenizer: Tokenizer, options: SchemaOptions) -> None:
        kernels = KernelStore(chosen_isa(), cache_dir() / "kernels")
        self.vocabulary = Vocabulary.of(tokenizer, kernels=kernels)
        self.options = options
        warm(self.vocabulary)  # as a server does when it starts
        self.out = np.zeros(self.vocabulary.n_words, np.uint32)

    def compile(self, schema: Any) -> Any:
        return compile_schema(schema, self.vocabulary, self.options)

    def matcher(self, compiled: Any) -> Any:
        return compiled.matcher()

    def mask(self, matcher: Any) -> None:
        matcher.mask(self.out)

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.advance(token))

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.may_end())


class LlGuidance:
    """The other one."""

    def __init__(self, tokenizer: Tokenizer, spacing: str) -> None:
        tokens = [tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size)]
        special = sorted(tokenizer.special_ids)

        class Given:
            eos_token_id, bos_token_id, special_token_ids = tokenizer.eos_id, None, special

            def __init__(self) -> None:
                self.tokens = tokens

            def __call__(self, text: str) -> list[int]:
                return list(tokenizer.encode(text, add_special=False))

        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Given()))
        self.flexible = spacing != "compact"
        self.out = llguidance.numpy.allocate_token_bitmask(1, self.tokenizer.vocab_size)

    def compile(self, schema: Any) -> Any:
        options = {"whitespace_flexible": self.flexible}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any) -> None:
        llguidance.numpy.fill_next_token_bitmask(matcher, self.out, 0)

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))

    def complete(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


def judge(engine: Any, schema: Any, tests: list[tuple[bool, list[int]]], score: Score) -> list[list[int]]:
    """Compile and try every instance; returns those valid ones that it accepts."""
    start = time.thread_time()
    try:
        compiled = engine.compile(schema)
        engine.mask(engine.matcher(compiled))
    except (MartletError, ValueError):
        score.refused += 1
        return []
    score.first.append(time.thread_time() - start)
    right, kept = True, []
    for valid, ids in tests:
        matcher = engine.matcher(compiled)
        ok = all(engine.take(matcher, token) for token in ids) and engine.complete(matcher)
        right &= ok == valid
        score.invalid += not valid
        score.accepted += ok and not valid
        score.rejected += valid and not ok
        if ok and valid:
            kept.append(ids)
    score.right += right
    return kept


def timed(engine: Any, schema: Any, instances: list[list[int]], score: Score) -> None:
    """Compile anew and write the instances, a mask before each token and one before the end."""
    clock = time.thread_time
    compiled = engine.compile(schema)
    for ids in instances:
        matcher = engine.matcher(compiled)
        for token in [*ids, None]:
            start = clock()
            engine.mask(matcher)
            done = clock()
            score.masks.append(done - start)
            if token is not None:
                assert engine.take(matcher, token)
                score.takes.append(clock() - done)


def main() -> None:
    """Judge, time, print."""
    args = _arguments()
    checkpoint = open_checkpoint(args.model)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata, source=str(args.model))
    rows = [json.loads(line) for line in args.sample.read_text(encoding="utf-8").splitlines()][: args.limit]
    start = time.perf_counter()
    engines = {
        "martlet": Martlet(tokenizer, SchemaOptions(spacing=args.spacing, ordered=False)),
        "llguidance": LlGuidance(tokenizer, args.spacing),
    }
    gc.collect()
    # vocabularies live as long as the process: the collector need not look at them again and again
    gc.freeze()
    print(f"engines made in {time.perf_counter() - start:.2f} s; {len(rows)} schemas, {args.spacing}", flush=True)
    scores = {name: Score() for name in engines}
    kept: list[dict[str, list[list[int]]]] = []
    for row in rows:
        tests = [
            (test["valid"], tokenizer.encode(write(test["data"], args.spacing), add_special=False))
            for test in row["tests"]
        ]
        kept.append({name: judge(engine, row["schema"], tests, scores[name]) for name, engine in engines.items()})
    for _ in range(args.rounds):
        for row, instances in zip(rows, kept, strict=True):
            both = [ids for ids in instances["martlet"] if ids in instances["llguidance"]]
            for name, engine in engines.items():
                if both:
                    timed(engine, row["schema"], both, scores[name])
    for name, score in scores.items():
        report(name, score, len(rows))


def write(data: Any, spacing: str) -> str:
    """An instance as text."""
    return json.dumps(data, ensure_ascii=False, separators=SEPARATORS[spacing])


def report(name: str, score: Score, n: int) -> None:
    """Print an engine's figures."""
    print(
        f"{name}: right {score.right} of {n} ({100 * score.right / n:.2f} %), refused {score.refused}, valid rejected "
        f"{score.rejected}, invalid accepted {score.accepted} of {score.invalid} "
        f"({100 * score.accepted / max(score.invalid, 1):.2f} %)"
    )
    for what, times, unit, scale in (
        ("mask", score.masks, "µs", 1e6),
        ("take", score.takes, "µs", 1e6),
        ("first mask", score.first, "ms", 1e3),
    ):
        if times:
            t = np.array(times) * scale
            print(
                f"  {what}: {len(t)}, mean {t.mean():.2f}, p50 {np.median(t):.2f}, p99 {np.quantile(t, 0.99):.2f}, "
                f"max {t.max():.2f} {unit}"
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file, for its vocabulary")
    parser.add_argument("sample", type=Path, help="schemas with instances, a JSON object a line")
    parser.add_argument("--spacing", choices=sorted(SEPARATORS), default="compact")
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is timed")
    parser.add_argument("--limit", type=int, default=None, help="only the first schemas")
    return parser.parse_args()


if __name__ == "__main__":
    main()
