"""Time to first token of a chat's next turn after the process was killed: from kept KV pages, and
computed anew.

    python bench/restart.py MODEL [--turns 10] [--words 90] [--runs 3] [--json FILE]

A process holds a chat of some turns and is killed (SIGKILL). The next process asks one question
more. It is measured with the pages that the first one left, and without; the answers must be the
same tokens. Loading the model is not in the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from martlet import LLM, SamplingParams

WORDS = [
    "river",
    "mountain",
    "engine",
    "paper",
    "window",
    "garden",
    "letter",
    "number",
    "winter",
    "music",
    "table",
    "answer",
    "model",
    "memory",
    "page",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def question(turn: int, n_words: int) -> str:
    """A question that no other turn asks."""
    rng = random.Random(turn)
    return " ".join(rng.choice(WORDS) for _ in range(n_words)) + f"? ({turn})"


def chat(model: str, turns: int, n_words: int, folder: str | None) -> tuple[list[Any], Any]:
    """Hold a chat; returns its messages and the last output."""
    messages: list[Any] = []
    output = None
    with LLM(model, kv_disk=folder) as llm:
        for turn in range(turns):
            messages.append({"role": "user", "content": question(turn, n_words)})
            [output] = llm.chat(messages, GREEDY)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
        print(json.dumps(messages), flush=True)
        if folder is not None:
            os.kill(os.getpid(), signal.SIGKILL)
    return messages, output


def next_turn(model: str, messages: list[Any], n_words: int, folder: str | None) -> dict[str, Any]:
    """One question more, in an engine that has just started."""
    asked = [*messages, {"role": "user", "content": question(len(messages), n_words)}]
    with LLM(model, kv_disk=folder) as llm:
        # so that neither run pays for what only the first request does
        llm.generate("x", SamplingParams(max_tokens=1))
        start = time.perf_counter()
        stream = llm.stream_chat(asked, GREEDY)
        next(stream)
        first = time.perf_counter() - start
        for _ in stream:
            pass
        output = stream.result
        assert output is not None
        assert output.metrics is not None
        return {
            "ttft_s": first,
            "prompt_tokens": output.metrics.n_prompt,
            "cached_tokens": output.metrics.n_cached,
            "answer": output.outputs[0].token_ids,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=90, help="words of a question")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    # what the killed process runs as
    parser.add_argument("--first", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first is not None:
        chat(args.model, args.turns, args.words, args.first)
        return
    warm, cold = [], []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, args.model, "--turns", str(args.turns), "--words", str(args.words)]
            first = subprocess.run([*command, "--first", folder], stdout=subprocess.PIPE, text=True, check=False)
            assert first.returncode == -signal.SIGKILL, first.returncode
            messages = json.loads(first.stdout)
            disk_bytes = sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())
            warm.append(next_turn(args.model, messages, args.words, folder))
        cold.append(next_turn(args.model, messages, args.words, None))
        assert warm[-1]["answer"] == cold[-1]["answer"], "the kept pages changed the answer"
    for name, found in (("kept pages", warm), ("computed anew", cold)):
        times = sorted(run["ttft_s"] for run in found)
        print(
            f"turn {args.turns + 1}, {name}: {1000 * statistics.median(times):,.1f} ms to the first token"
            f" ({1000 * times[0]:,.1f} to {1000 * times[-1]:,.1f}); {found[0]['prompt_tokens']:,} prompt tokens,"
            f" {found[0]['cached_tokens']:,} of them from disk"
        )
    ratio = statistics.median(run["ttft_s"] for run in cold) / statistics.median(run["ttft_s"] for run in warm)
    print(f"{ratio:.1f} times as fast; {disk_bytes / 1e6:,.1f} MB on disk; same answers")
    if args.json:
        Path(args.json).write_text(json.dumps({"kept": warm, "anew": cold, "disk_bytes": disk_bytes}, indent=1))


if __name__ == "__main__":
    main()
