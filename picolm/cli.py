"""The command line, and the loop that makes text: prompt in, tokens out, until one ends it.

Text goes to stdout as it comes, everything else to stderr, in the C's order and wording.

Differences from the C (picolm.c): `-n N` makes N tokens (there: N + 1); numbers are checked; a prompt longer than the context is an error
(there: an empty answer), and so is a cache or a text that cannot be written; threads as processors; `--order`, `-m`, `--help`. Next: `model.py`.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from picolm.grammar import Grammar
from picolm.kvcache import kvcache_load, kvcache_save
from picolm.model import KVCache, Model, model_forward, prefill
from picolm.sampler import Sampler
from picolm.tensor import Team
from picolm.tokenizer import Tokenizer

USAGE = """Usage: picolm <model.gguf> [options]

  -p <prompt>    Input prompt (or pipe via stdin)
  -n <int>       Max tokens to generate (default: 256)
  -t <float>     Temperature (default: 0.8, 0=greedy)
  -k <float>     Top-p / nucleus sampling (default: 0.9)
  -s <int>       RNG seed (default: 42)
  -c <int>       Context length override
  -j <int>       Number of threads (default: processors, at most 4)
  --json         JSON output mode: always complete, valid JSON
  --cache <file> KV cache file (saves/loads prompt state)
  -m <int>       MB for weights as float32; if they need more, they stream (default: half of what is free)
  --order <name> Order of sums: fast (default), sse or scalar (the C's, bit for bit)
"""
# Option: default, least, most. A default's type is the option's.
NUMBERS = {"-n": (256, 0, 1 << 31), "-t": (0.8, 0.0, 3.4e38), "-k": (0.9, 0.0, 1.0), "-s": (42, 0, (1 << 64) - 1), "-c": (0, 1, 1 << 62),
           "-j": (min(4, os.cpu_count() or 1), 1, 1024), "-m": (-1, 0, 1 << 40)}  # fmt: skip


class UsageError(ValueError):
    """A command line that is not understood."""


def parse(args: list[str]) -> dict[str, Any]:
    """Options by name, each checked; the model's path is `model`."""
    if not args:
        raise UsageError("No model given.")
    options: dict[str, Any] = {"model": args[0], "--json": False, "-p": None, "--cache": None, "--order": "fast"}
    options |= {flag: default for flag, (default, _, _) in NUMBERS.items()}
    rest = iter(args[1:])
    for flag in rest:
        if flag not in options or flag == "model":
            raise UsageError(f"Unknown option: {flag}")
        text = "" if flag == "--json" else next(rest, None)
        if text is None:
            raise UsageError(f"Option {flag} needs a value")
        options[flag] = True if flag == "--json" else _number(flag, text) if flag in NUMBERS else text
    if options["--order"] not in ("fast", "sse", "scalar"):
        raise UsageError(f"--order {options['--order']}: fast, sse or scalar")
    if options["--cache"] == "":
        raise UsageError("--cache needs the name of a file")
    if options["--json"] and options["-n"] == 0:
        raise UsageError("-n 0 leaves no room for JSON")
    return options


def _number(flag: str, text: str) -> float:
    default, low, high = NUMBERS[flag]
    try:
        value = type(default)(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise UsageError(f"Option {flag} is {text!r}: a number from {low} to {high} is needed")
    return value


def generate(m: Model, kv: KVCache, ends: frozenset[int], prompt: list[int], n: int, sampler: Sampler, grammar: Grammar | None) -> Iterator[int]:  # fmt: skip
    """Up to n tokens that follow a prompt, of which the cache may hold a beginning. The one that ends the text is among them."""
    n = min(n, m.config.max_seq_len - len(prompt) + 1)  # the last token need not be run
    logits = prefill(m, kv, prompt[len(kv.tokens) :])
    for i in range(n):
        if grammar is not None:
            grammar.apply(logits, n - i)
        token = sampler.sample(logits)
        yield token
        if grammar is not None:
            grammar.advance(token)
        if i == n - 1 or token in ends or (grammar is not None and grammar.is_complete):
            return
        logits = model_forward(m, kv, [token])


def main(args: list[str] | None = None, out: BinaryIO | None = None) -> int:
    """Run; the exit status."""
    args = sys.argv[1:] if args is None else args
    if args[-1:] in (["--help"], ["-h"]) and args[-2:-1] != ["-p"]:
        print(USAGE)
        return 0
    try:
        options = parse(args)
        text = os.fsencode(options["-p"] or "")
        if options["-p"] is None and sys.stdin is not None and not sys.stdin.isatty():
            text = sys.stdin.buffer.read()
        if not text:
            raise UsageError("No prompt provided. Use -p or pipe via stdin.")
        _run(options, text, out or io.FileIO(1, "wb", closefd=False))
    except (ValueError, MemoryError, OSError, RuntimeError) as error:  # the last one: a thread that cannot start
        what = f"cannot read stdin, or write the text: {error}" if isinstance(error, OSError) else str(error)
        _tell(what or "out of memory", USAGE if isinstance(error, UsageError) else "Failed")
        return 1
    return 0


def _tell(*lines: str) -> None:
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr or io.StringIO(), flush=True)  # None if closed


def _load(options: dict[str, Any]) -> Model:
    """The model, its weights held as numbers if they fit."""
    _tell(f"Loading model: {options['model']}")
    m = Model(options["model"], options["-c"], Team(options["-j"], options["--order"]))
    c = m.config
    _tell("Model config:", f"  n_embd={c.n_embd}, n_ffn={c.n_ffn}, n_heads={c.n_heads}, n_kv_heads={c.n_kv_heads}")
    _tell(f"  n_layers={c.n_layers}, vocab_size={c.vocab_size}, max_seq={c.max_seq_len}")
    _tell(f"  head_dim={c.head_dim}, rope_base={c.rope_base:.1f}")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    m.stream = 4 * m.n_weights > (free // 2 if options["-m"] < 0 else options["-m"] << 20)
    held = not m.stream and options["--order"] == "fast"
    where = "held as float32" if held else "streamed from the file" if m.stream else "used as they are in the file"
    _tell(f"Weights: {m.n_weights / 1e6:.1f} million, {where}")
    if held:
        m.hold()
    return m


def _run(options: dict[str, Any], text: bytes, out: BinaryIO) -> None:
    m, n = _load(options), options["-n"]
    tokenizer = Tokenizer(m.file.meta, m.config.vocab_size)
    m.file.meta.clear()  # the vocabulary has what it needs
    _tell(f"Tokenizer loaded: {len(tokenizer.vocab)} tokens, bos={tokenizer.bos_id}, eos={tokenizer.eos_id}")
    grammar = Grammar(tokenizer) if options["--json"] else None
    if grammar is not None:
        _tell("JSON grammar mode enabled")
    prompt = tokenizer.encode(text)
    if not 0 < len(prompt) <= m.config.max_seq_len:
        raise ValueError(f"a prompt of {len(prompt)} tokens: the context has room for 1 to {m.config.max_seq_len}")
    kv, news = kvcache_load(m, options["--cache"], prompt) if options["--cache"] else (KVCache(m.config), [])
    skipped = len(kv.tokens)
    _tell(*news, *([f"Skipping {skipped} cached prompt tokens"] if skipped else []))
    _tell(f"Prompt: {len(prompt)} tokens, generating up to {n} "
          f"(temp={options['-t']:.2f}, top_p={options['-k']:.2f}, threads={options['-j']})", "---")  # fmt: skip
    begin, first, made, previous = time.perf_counter(), 0.0, 0, prompt[-1]
    sampler = Sampler(options["-t"], options["-k"], options["-s"])
    for token in generate(m, kv, tokenizer.end_ids, prompt, n, sampler, grammar):
        first = first or time.perf_counter()
        made += 1
        out.write(tokenizer.decode(previous, token))
        previous = token
    out.write(b"\n")
    end = time.perf_counter()
    if made < n and len(prompt) + made > m.config.max_seq_len:
        _tell(f"The context of {m.config.max_seq_len} is full")
    if options["--cache"]:
        kvcache_save(m, kv, options["--cache"], len(prompt))
        _tell(f"KV cache saved: {len(prompt)} positions to {options['--cache']}")
    rates = [((first or end) - begin, len(prompt) - skipped), (end - (first or end), made)]
    told = [f"{k} tokens in {t:.2f}s ({k / t if t else 0:.1f} tok/s)" for t, k in rates]
    _tell("---", f"Prefill: {told[0]}{' [partially cached]' if skipped else ''}", f"Generation: {told[1]}")
    _tell(f"Total: {end - begin:.2f}s", f"Memory: {(kv.keys.nbytes + kv.values.nbytes) / 2**20:.2f} MB FP16 KV cache")
