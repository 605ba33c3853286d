"""The command line, and the loop that makes text: prompt in, tokens out, until one ends it.

Text goes to stdout as it comes, everything else to stderr, in the C's order and wording. Start reading here, then `model.py`.

Differences from the C (picolm.c): `-n N` makes N tokens (there: N + 1); every number is checked; a prompt longer than the context is
an error (there: an empty answer), and so is a cache that cannot be written; the text of the end token is not printed; the number of
threads is that of the processors, at most 4; `--order` and `-m` are new. Options: `USAGE`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from picolm.grammar import Grammar
from picolm.kvcache import CacheError, kvcache_load, kvcache_save
from picolm.model import KVCache, Model, model_forward, prefill
from picolm.sampler import Sampler
from picolm.tensor import Team
from picolm.tokenizer import Tokenizer

__all__ = ["Options", "generate", "main"]

USAGE = """picoLM in NumPy

Usage: picolm <model.gguf> [options]

Generation options:
  -p <prompt>    Input prompt (or pipe via stdin)
  -n <int>       Max tokens to generate (default: 256)
  -t <float>     Temperature (default: 0.8, 0=greedy)
  -k <float>     Top-p / nucleus sampling (default: 0.9)
  -s <int>       RNG seed (default: 42)
  -c <int>       Context length override
  -j <int>       Number of threads (default: processors, at most 4)

Advanced options:
  --json         JSON output mode: always complete, valid JSON
  --cache <file> KV cache file (saves/loads prompt state)
  -m <int>       MB for weights as float32; where they do not fit, they stream from the file
                 (default: half of the free memory; 0: always stream)
  --order <name> Order of sums: fast (default), sse or scalar (the C's, bit for bit)
"""


@dataclass
class Options:
    """The command line."""

    model: str
    prompt: bytes | None = None
    n: int = 256
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 42
    context: int = 0
    threads: int = min(4, os.cpu_count() or 1)
    json: bool = False
    cache: str = ""
    memory: int = -1
    order: str = "fast"


class UsageError(ValueError):
    """A command line that is not understood."""


_NAMES = {"-p": "prompt", "-n": "n", "-t": "temperature", "-k": "top_p", "-s": "seed", "-c": "context", "-j": "threads", "--cache": "cache",
          "-m": "memory", "--order": "order"}  # fmt: skip
_RANGES = {"n": (0, 1 << 31), "seed": (0, (1 << 64) - 1), "context": (1, 1 << 62), "threads": (1, 1024), "memory": (0, 1 << 40),
           "temperature": (0.0, 3.4e38), "top_p": (0.0, 1.0)}  # fmt: skip


def parse(args: list[str]) -> Options:
    """Options, each checked."""
    if not args:
        raise UsageError("No model given.")
    options, rest = Options(args[0]), iter(args[1:])
    for flag in rest:
        if flag == "--json":
            options.json = True
            continue
        field, value = _NAMES.get(flag), next(rest, None)
        if field is None or value is None:
            raise UsageError(f"Unknown option: {flag}" if field is None else f"Option {flag} needs a value")
        setattr(options, field, _checked(flag, field, value))
    return options


def _checked(flag: str, field: str, text: str) -> object:
    if field == "prompt":
        return os.fsencode(text)
    if field == "order" and text not in ("fast", "sse", "scalar"):
        raise UsageError(f"--order {text}: fast, sse or scalar")
    if field in ("order", "cache"):
        return text
    low, high = _RANGES[field]
    try:
        value = float(text) if isinstance(low, float) else int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise UsageError(f"Option {flag} is {text!r}: a number from {low} to {high} is needed")
    return value


def generate(
    m: Model,
    kv: KVCache,
    tokenizer: Tokenizer,
    prompt: list[int],
    n: int,
    sampler: Sampler,
    grammar: Grammar | None = None,
) -> Iterator[int]:
    """Up to n tokens that follow a prompt, of which the cache may hold a beginning. The end token is among them."""
    n = min(n, m.config.max_seq_len - len(prompt) + 1)  # the last token need not be run
    logits = prefill(m, kv, prompt[len(kv.tokens) :])
    for i in range(n):
        if grammar is not None:
            grammar.apply(logits, n - i)
        token = sampler.sample(logits)
        yield token
        if grammar is not None:
            grammar.advance(token)
        if i == n - 1 or token in tokenizer.end_ids or (grammar is not None and grammar.is_complete):
            return
        logits = model_forward(m, kv, [token])


def main(args: list[str] | None = None, out: BinaryIO | None = None) -> int:
    """Run; the exit status."""
    args = sys.argv[1:] if args is None else args
    if args[-1:] == ["--help"]:
        print(USAGE)
        return 0
    try:
        options = parse(args)
        if options.prompt is None and not sys.stdin.isatty():
            options.prompt = sys.stdin.buffer.read()
        if not options.prompt:
            raise UsageError("No prompt provided. Use -p or pipe via stdin.")
    except UsageError as error:
        _tell(f"{error}\n{USAGE}")
        return 1
    try:
        return _run(options, options.prompt, out or sys.stdout.buffer)
    except CacheError as error:
        _tell(str(error))
    except (ValueError, MemoryError) as error:
        _tell(f"{error or 'out of memory'}\nFailed")
    return 1


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _load(options: Options) -> Model:
    """The model, its weights held as numbers if they fit."""
    _tell(f"Loading model: {options.model}")
    m = Model(options.model, options.context, Team(options.threads, options.order))  # type: ignore[arg-type]
    c = m.config
    _tell(f"Model config:\n  n_embd={c.n_embd}, n_ffn={c.n_ffn}, n_heads={c.n_heads}, n_kv_heads={c.n_kv_heads}")
    _tell(
        f"  n_layers={c.n_layers}, vocab_size={c.vocab_size}, max_seq={c.max_seq_len}\n  head_dim={c.head_dim}, rope_base={c.rope_base:.1f}"
    )
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    m.stream = 4 * m.n_weights > (free // 2 if options.memory < 0 else options.memory << 20)
    _tell(f"Weights: {m.n_weights / 1e6:.1f} million, {'streamed from the file' if m.stream else 'held as float32'}")
    if not m.stream and options.order == "fast":
        m.hold()
    return m


def _run(options: Options, text: bytes, out: BinaryIO) -> int:
    m = _load(options)
    tokenizer = Tokenizer(m.file.meta, m.config.vocab_size)
    m.file.meta.clear()  # the vocabulary has what it needs
    _tell(f"Tokenizer loaded: {len(tokenizer.vocab)} tokens, bos={tokenizer.bos_id}, eos={tokenizer.eos_id}")
    grammar = Grammar(tokenizer) if options.json else None
    if grammar is not None:
        _tell("JSON grammar mode enabled")
    prompt = tokenizer.encode(text)
    if not 0 < len(prompt) <= m.config.max_seq_len:
        raise ValueError(f"a prompt of {len(prompt)} tokens: the context has room for 1 to {m.config.max_seq_len}")
    kv, news = kvcache_load(m, options.cache, prompt) if options.cache else (KVCache(m.config), "")
    skipped = len(kv.tokens)
    _tell((news + "\n" if news else "") + (f"Skipping {skipped} cached prompt tokens\n" if skipped else "")
          + f"Prompt: {len(prompt)} tokens, generating up to {options.n} "
          f"(temp={options.temperature:.2f}, top_p={options.top_p:.2f}, threads={options.threads})\n---")  # fmt: skip
    begin, first, made, previous = time.perf_counter(), 0.0, 0, prompt[-1]
    for token in generate(
        m, kv, tokenizer, prompt, options.n, Sampler(options.temperature, options.top_p, options.seed), grammar
    ):
        first = first or time.perf_counter()
        made += 1
        out.write(tokenizer.decode(previous, token))
        out.flush()
        previous = token
    out.write(b"\n")
    out.flush()
    end = time.perf_counter()
    if made < options.n and len(prompt) + made > m.config.max_seq_len:
        _tell(f"The context of {m.config.max_seq_len} is full")
    if options.cache:
        kvcache_save(m, kv, options.cache, len(prompt))
        _tell(f"KV cache saved: {len(prompt)} positions to {options.cache}")
    _statistics(len(prompt) - skipped, made, (first or end) - begin, end - (first or end), skipped > 0)
    size = kv.keys.nbytes + kv.values.nbytes
    _tell(f"Memory: {size / 2**20:.2f} MB FP16 KV cache, {_anonymous() / 2**20:.2f} MB in all")
    return 0


def _statistics(computed: int, made: int, prefill_time: float, gen_time: float, cached: bool) -> None:
    rate = [n / t if t > 0 else 0.0 for n, t in ((computed, prefill_time), (made, gen_time))]
    _tell(
        f"---\nPrefill: {computed} tokens in {prefill_time:.2f}s ({rate[0]:.1f} tok/s){' [partially cached]' if cached else ''}"
    )
    _tell(f"Generation: {made} tokens in {gen_time:.2f}s ({rate[1]:.1f} tok/s)\nTotal: {prefill_time + gen_time:.2f}s")


def _anonymous() -> int:
    """Memory that the kernel cannot drop, as it counts it for this process (Linux; elsewhere 0)."""
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) << 10 for line in f if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0
