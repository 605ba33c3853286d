"""Martlet's server under load against OpenVINO GenAI's continuous batching on the same file: one of
the bars of serving.

    python -m venv OTHER && OTHER/bin/pip install openvino-genai
    python bench/compare_openvino.py --openvino OTHER/bin/python --model FILE.gguf

16 clients, prompts of 128 random tokens, greedy answers of 64, two threads: the load of
compare_load.py. Martlet is asked through HTTP by the load generator; OpenVINO's pipeline is driven
in its own process without a server, which is to its advantage, with the settings that it has by
default. Output tokens ÷ time, prompts included; runs alternate, medians count. The bar is ≥ 2.0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REQUESTS, CLIENTS, PROMPT, ANSWER, VOCAB, SEED = 48, 16, 128, 64, 40_000, 0


def main() -> int:
    """Measure and print; or, with --inside, be the process that OpenVINO runs in."""
    args = _arguments()
    if args.inside:
        print(json.dumps(_openvino(args)))
        return 0
    from compare_load import _measure, _served

    from martlet.bench.load_generator import Load
    from martlet.bench.report import about

    found: dict[str, list[dict[str, Any]]] = {"martlet": [], "openvino": []}
    args.models = args.model.parent
    load = Load(args.requests, CLIENTS, prompt_tokens=PROMPT, gen_tokens=ANSWER, vocab=VOCAB, warmup=2, seed=SEED)
    for _ in range(args.rounds):
        with _served(args, args.model.name, "martlet") as port:
            found["martlet"].append({"tokens_per_s": _measure(port, load)["generated_tokens_per_s"]})
        command = [*args.serve_with.split(), str(args.openvino), __file__, "--inside", "--model", str(args.model)]
        command += ["--threads", str(args.threads), "--requests", str(args.requests)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found["openvino"].append(json.loads(done.stdout.splitlines()[-1]))
        print({name: runs[-1]["tokens_per_s"] for name, runs in found.items()}, file=sys.stderr)
    if args.out is not None:
        args.out.write_text(json.dumps({**about(), **found}, indent=1), encoding="utf-8")
    ours, theirs = (statistics.median(run["tokens_per_s"] for run in runs) for runs in found.values())
    version = found["openvino"][0]["version"]
    print(f"output tokens/s: Martlet {ours:.1f}, OpenVINO GenAI {version} {theirs:.1f}: {ours / theirs:.2f} (≥ 2.0)")
    return 0


def _openvino(args: argparse.Namespace) -> dict[str, Any]:
    """The same load, a request more whenever one has ended."""
    import random

    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    numbers = random.Random(SEED)
    prompts = [[numbers.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(args.requests + 2)]
    pipeline = genai.ContinuousBatchingPipeline(
        str(args.model), genai.SchedulerConfig(), "CPU", {"INFERENCE_NUM_THREADS": args.threads}
    )
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = ANSWER
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False

    def run(wanted: list[list[int]]) -> tuple[float, int]:
        waiting, running, n_tokens, start = list(enumerate(wanted)), {}, 0, time.perf_counter()
        while waiting or running:
            while waiting and len(running) < CLIENTS:
                number, prompt = waiting.pop(0)
                ids = ov.Tensor(np.array([prompt], np.int64))
                running[number] = pipeline.add_request(run.next, ids, config)  # type: ignore[attr-defined]
                run.next += 1  # type: ignore[attr-defined]
            pipeline.step()
            for number, handle in list(running.items()):
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    n_tokens += sum(len(output.generated_ids) for output in handle.read_all())
                    del running[number]
        return time.perf_counter() - start, n_tokens

    run.next = 0  # type: ignore[attr-defined]
    run(prompts[:2])
    seconds, n_tokens = run(prompts[2:])
    assert n_tokens == args.requests * ANSWER, n_tokens
    return {"tokens_per_s": n_tokens / seconds, "seconds": seconds, "version": genai.__version__}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openvino", type=Path, help="a Python that has openvino-genai")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file that both can read")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--serve-with", default="nice -n 5", help="what both are started with")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write every run as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
