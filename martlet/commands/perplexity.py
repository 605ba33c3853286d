"""Measure how well a model predicts a text: exp of the mean negative log-probability of its tokens.

The method is llama-perplexity's: the text's tokens are cut into windows of `context` tokens (a rest
that fills none is left out); each window starts with the beginning token in place of its first,
where the model wants one; and only the second half of a window is scored, so that every scored
token has half a window before it.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from martlet.commands.arguments import MODEL_HELP, add_engine_options, open_llm
from martlet.commands.common import read_file
from martlet.errors import RequestError
from martlet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from martlet.llm import LLM

DEFAULT_CONTEXT = 512


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("file", help='the text, UTF-8; "-" reads stdin')
    parser.add_argument("--chunks", type=int, metavar="N", help="stop after this many windows")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser, context=f"windows of {DEFAULT_CONTEXT}")


def execute(args: Namespace) -> int:
    if args.chunks is not None and args.chunks < 1:
        raise RequestError(f"chunks is {args.chunks}; expected 1 or more.", param="chunks")
    text = read_file(args.file)
    size = DEFAULT_CONTEXT if args.max_context is None else args.max_context
    # one more: a request generates at least one token
    with open_llm(args, max_context=size + 1) as llm:
        tokenizer = llm.get_tokenizer()
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        listed = list(windows(tokenizer.encode(text), size, bos))[: args.chunks]
        if not listed:
            raise RequestError(f"The text is shorter than one window of {size:,} tokens.", param="file")
        scores: list[float] = []
        shows = not args.json and sys.stderr.isatty()
        for number, window in enumerate(listed, 1):
            scores += _scores(llm, window)[size // 2 :]
            if shows:
                print(f"\r{number} of {len(listed)}: {_perplexity(scores):.4f}", end="", file=sys.stderr, flush=True)
    error = _perplexity(scores) * _standard_error(scores)
    if args.json:
        result = {"perplexity": _perplexity(scores), "error": error, "tokens": len(scores), "windows": len(listed)}
        print(json.dumps(result))
    else:
        if shows:
            print(file=sys.stderr)
        print(f"perplexity {_perplexity(scores):.4f} ± {error:.4f} ({len(scores):,} tokens, {len(listed)} windows)")
    return 0


def windows(ids: Sequence[int], size: int, bos: int | None) -> Iterator[list[int]]:
    """Cut ids into whole windows, the first token of each replaced by `bos` if there is one."""
    for start in range(0, len(ids) - size + 1, size):
        window = list(ids[start : start + size])
        yield window if bos is None else [bos, *window[1:]]


def _scores(llm: LLM, window: list[int]) -> list[float]:
    """Negative log-probabilities of the window's tokens but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    [output] = llm.generate({"prompt_token_ids": window}, params)
    assert output.prompt_logprobs is not None
    return [
        -entry[token].logprob for token, entry in zip(window, output.prompt_logprobs, strict=True) if entry is not None
    ]


def _perplexity(scores: Sequence[float]) -> float:
    return math.exp(math.fsum(scores) / len(scores))


def _standard_error(scores: Sequence[float]) -> float:
    if len(scores) < 2:
        return math.inf
    mean = math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return math.sqrt(variance / len(scores))
