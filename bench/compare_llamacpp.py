"""Martlet against llama.cpp on the same files: the bars that the project sets itself, measured in
turn on this machine.

    python bench/compare_llamacpp.py --llama-cpp BUILD/bin --models FOLDER [--ik BUILD/bin]
                                     [--isa avx2] [--speed-only] [--out comparison]

writes comparison.json and comparison.md. docs/tuning.md says how llama.cpp's programs are built.
Both use the same number of threads, and their runs alternate (ours, theirs, ours, theirs …), so
that whatever slows the machine slows both; medians count, and the spread is shown. The Q4_0 file of
SmolLM2 is made with `llama-quantize --allow-requantize` from the Q4_1 one; both engines read that
same file. `--ik` names a build of ik_llama.cpp, the fork with the fastest kernels for CPUs, which
packs weights when it loads them (`-rtr 1`). `--isa` holds our kernels to an instruction set; the
builds beside them must then be made for the same. Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODELS = {
    "smollm2-q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "smollm2-q4_0": "SmolLM2-135M-Instruct.Q4_0.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
    "qwen-1.5b": "qwen2.5-coder-1.5b.gguf",
}
BARS = {  # least decode ratio, least prefill ratio
    "smollm2-q4_1": (1.8, 3.0),
    "smollm2-q4_0": (1.6, 1.8),
    "gemma3-270m": (1.5, 2.0),
    "qwen-1.5b": (1.25, 1.8),
}
OTHER_BARS = (1.4, 2.0)
DECODE, PREFILL = ("-p", "0", "-n", "64", "-d", "128"), ("-p", "512", "-n", "0")
IK_DECODE = ("-p", "0", "-n", "0", "-gp", "128,64")  # its name for DECODE
ROOFLINE_BAR, PERPLEXITY_BAR, MEMORY_BAR_MB, FIRST_TOKEN_BAR_S = 0.85, 1.005, 300, 1.0


@dataclass
class Machine:
    """What the runs share."""

    llama_cpp: Path
    ik: Path | None
    threads: int
    rounds: int
    text: Path | None
    speed_only: bool


@dataclass
class Row:
    """What was measured of one model."""

    model: str
    values: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    """Measure the models that are there and write the two files."""
    args = _arguments()
    if args.isa is not None:
        os.environ["MARTLET_ISA"] = args.isa
    machine = Machine(args.llama_cpp, args.ik, args.threads, args.rounds, args.text, args.speed_only)
    files = {path.stem: path for path in args.files}
    if not files:
        _make_q4_0(machine, args.models)
        files = {name: args.models / file for name, file in MODELS.items() if name in (args.only or MODELS)}
    rows = []
    for name, path in files.items():
        if not path.exists():
            print(f"{path} is not there: left out", file=sys.stderr)
            continue
        rows.append(measure(name, path, machine))
        _write(args.out, rows, machine)
    print(Path(f"{args.out}.md").read_text(encoding="utf-8"))
    return 0


def measure(name: str, path: Path, machine: Machine) -> Row:
    """Every bar of one model."""
    row = Row(name)
    for key, arguments in (("decode", DECODE), ("prefill", PREFILL)):
        runs: dict[str, Callable[[], Any]] = {
            "ours": lambda arguments=arguments: _our_bench(path, arguments, machine),
            "llama.cpp": lambda arguments=arguments: _llama_bench(machine.llama_cpp, path, arguments, machine),
        }
        if machine.ik is not None:
            its = (*(IK_DECODE if key == "decode" else PREFILL), "-rtr", "1")
            runs["ik_llama.cpp"] = lambda ik=machine.ik, its=its: _llama_bench(ik, path, its, machine)
        results = alternate(machine.rounds, runs)
        row.values[key] = _compared({engine: [run["rate"] for run in done] for engine, done in results.items()})
        if key == "decode":
            ours = results["ours"]
            row.values["roofline"] = statistics.median(run["roofline"]["share"] for run in ours)
            row.values["memory_bytes_per_s"] = statistics.median(run["roofline"]["memory_bytes_per_s"] for run in ours)
        print(f"{name} {key}: {row.values[key]}", file=sys.stderr)
    if machine.speed_only:
        return row
    if machine.text is not None:
        our, their = _our_perplexity(path, machine), _llama_perplexity(path, machine)
        row.values["perplexity"] = {"ours": our, "llama.cpp": their, "ratio": our / their}
    row.values["extra_memory_mb"] = _extra_memory_mb(path, machine)
    row.values["first_token_s"] = statistics.median(_first_token_s(path, machine) for _ in range(machine.rounds))
    row.values["load"] = _load(path, machine)
    return row


def alternate(rounds: int, runs: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """A B A B …: what each returned."""
    results: dict[str, list[Any]] = {engine: [] for engine in runs}
    for _ in range(rounds):
        for engine, run in runs.items():
            results[engine].append(run())
    return results


# -- ours ------------------------------------------------------------------------------------------
def _martlet(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "martlet", *arguments]


def _our_bench(path: Path, arguments: tuple[str, ...], machine: Machine) -> dict[str, Any]:
    command = _martlet("bench", str(path), *arguments, "-r", "3", "-t", str(machine.threads), "--json")
    found: dict[str, Any] = json.loads(_run(command))
    found["rate"] = found["decode" if "decode" in found else "prefill"]["tokens_per_s"]
    return found


def _extra_memory_mb(path: Path, machine: Machine) -> float:
    """Peak resident memory of a program that fills one context, beyond the file's size and that
    context's KV pages.
    """
    program = (
        "import sys; from martlet import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], threads=int(sys.argv[2]), max_context=2048, max_seqs=1, draft='off') as llm:\n"
        "    llm.generate({'prompt_token_ids': [100] * 1984}, SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))\n"
        "    print(llm.plan.kv)"
    )
    output, peak = _run_with_peak([sys.executable, "-c", program, str(path), str(machine.threads)])
    return (peak - path.stat().st_size - int(output)) / 1e6


def _our_perplexity(path: Path, machine: Machine) -> float:
    output = _run(_martlet("perplexity", str(path), str(machine.text), "-t", str(machine.threads), "--json"))
    return float(json.loads(output)["perplexity"])


def _first_token_s(path: Path, machine: Machine) -> float:
    """From the start of the process to the first byte of the answer, caches warm."""
    command = _martlet(
        "run", str(path), "The capital of France is", "-t", str(machine.threads), "-n", "4", "--temp", "0"
    )
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter()
        process.stdout.read()
    return first - start


def _load(path: Path, machine: Machine) -> dict[str, float]:
    """The start's phases, against reading the file from the system's memory: whole, and in pieces
    that are not kept.
    """
    path.read_bytes()
    start = time.perf_counter()
    path.read_bytes()
    whole_s = time.perf_counter() - start
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 22)
        while file.readinto(buffer):
            pass
    pieces_s = time.perf_counter() - start
    output = _run(_martlet("warmup", str(path), "-t", str(machine.threads)))
    phases = {
        line.split()[0]: float(line.split()[1]) for line in output.splitlines() if re.match(r"\w+ +[\d.]+ s$", line)
    }
    return {"read_whole_s": whole_s, "read_pieces_s": pieces_s, "load_s": phases.get("map", float("nan")), **phases}


def _run_with_peak(command: list[str]) -> tuple[str, int]:
    """A program's output and its own peak resident bytes (not its children's)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {errors}")
    return output, _maxrss_bytes(usage)


def _maxrss_bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# -- llama.cpp's -----------------------------------------------------------------------------------
def _llama_bench(build: Path, path: Path, arguments: tuple[str, ...], machine: Machine) -> dict[str, Any]:
    program = str(build / "llama-bench")
    output = _run([program, "-m", str(path), "-t", str(machine.threads), *arguments, "-r", "3", "-o", "json"])
    return {"rate": float(json.loads(output)[-1]["avg_ts"])}


def _llama_perplexity(path: Path, machine: Machine) -> float:
    program = str(machine.llama_cpp / "llama-perplexity")
    command = [program, "-m", str(path), "-f", str(machine.text), "-c", "512", "-t", str(machine.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        sys.exit(f"{program} printed no final estimate")
    return float(found[1])


def _make_q4_0(machine: Machine, models: Path) -> None:
    source, target = models / MODELS["smollm2-q4_1"], models / MODELS["smollm2-q4_0"]
    if source.exists() and not target.exists():
        _run([str(machine.llama_cpp / "llama-quantize"), "--allow-requantize", str(source), str(target), "Q4_0"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


# -- the report ------------------------------------------------------------------------------------
def _compared(runs: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, all runs, and of each peer the median of the rounds' ratios, with their range."""
    compared: dict[str, Any] = {"runs": runs, **{engine: statistics.median(rates) for engine, rates in runs.items()}}
    for peer in set(runs) - {"ours"}:
        ratios = [ours / theirs for ours, theirs in zip(runs["ours"], runs[peer], strict=True)]
        compared[f"÷ {peer}"] = (statistics.median(ratios), min(ratios), max(ratios))
    return compared


def _write(out: Path, rows: list[Row], machine: Machine) -> None:
    about = {
        "machine": platform.processor() or platform.machine(),
        "threads": machine.threads,
        "rounds": machine.rounds,
        "instruction set": os.environ.get("MARTLET_ISA", "native"),
    }
    Path(f"{out}.json").write_text(json.dumps({**about, "models": {r.model: r.values for r in rows}}, indent=1))
    lines = [
        f"{machine.threads} threads, {about['instruction set']}, medians of {machine.rounds} alternating runs;"
        " the bar in brackets, ✗ where it is missed.",
        "",
        "| | " + " | ".join(row.model for row in rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    lines += [
        f"| {title} | " + " | ".join(cell(row) for row in rows) + " |"
        for title, cell in _CELLS.items()
        if not machine.speed_only or title in _SPEED_CELLS
    ]
    Path(f"{out}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _speed_cell(key: str, which: int) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        speed, bar = row.values[key], BARS.get(row.model, OTHER_BARS)[which]
        ratio, least, most = speed["÷ llama.cpp"]
        text = f"{speed['ours']:.1f} ÷ {speed['llama.cpp']:.1f} = {ratio:.2f} [{least:.2f} to {most:.2f}] (≥ {bar})"
        text += "" if ratio >= bar else " ✗"
        if "ik_llama.cpp" in speed:
            ratio, least, most = speed["÷ ik_llama.cpp"]
            text += f"; ÷ ik_llama.cpp {speed['ik_llama.cpp']:.1f} = {ratio:.2f} [{least:.2f} to {most:.2f}]"
        return text

    return cell


def _roofline_cell(row: Row) -> str:
    share, speed = row.values["roofline"], row.values["memory_bytes_per_s"] / 1e9
    bar = f" (≥ {ROOFLINE_BAR}){'' if share >= ROOFLINE_BAR else ' ✗'}" if row.model == "qwen-1.5b" else ""
    return f"{share:.2f} of {speed:.1f} GB/s{bar}"


def _perplexity_cell(row: Row) -> str:
    found = row.values.get("perplexity")
    if found is None:
        return "–"
    return (
        f"{found['ours']:.4f} ÷ {found['llama.cpp']:.4f} = {found['ratio']:.4f} (≤ {PERPLEXITY_BAR})"
        f"{'' if found['ratio'] <= PERPLEXITY_BAR else ' ✗'}"
    )


def _limit_cell(key: str, bar: float, unit: str, only: str | None = None) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.values[key]
        if only is not None and row.model != only:
            return f"{value:.2f} {unit}"
        return f"{value:.2f} {unit} (≤ {bar}){'' if value <= bar else ' ✗'}"

    return cell


def _load_cell(row: Row) -> str:
    load = row.values["load"]
    return (
        f"{load['load_s']:.2f} s; reading the file {load['read_whole_s']:.2f} s (in pieces {load['read_pieces_s']:.2f})"
    )


_CELLS: dict[str, Callable[[Row], str]] = {
    "decode 64 after 128, tok/s": _speed_cell("decode", 0),
    "prefill 512, tok/s": _speed_cell("prefill", 1),
    "weights read ÷ memory bandwidth": _roofline_cell,
    "perplexity": _perplexity_cell,
    "peak memory beyond file + KV": _limit_cell("extra_memory_mb", MEMORY_BAR_MB, "MB"),
    "first token of `martlet run`": _limit_cell("first_token_s", FIRST_TOKEN_BAR_S, "s", "smollm2-q4_1"),
    "load": _load_cell,
}
_SPEED_CELLS = tuple(_CELLS)[:3]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder with llama-bench, llama-perplexity …")
    parser.add_argument("--ik", type=Path, help="folder with ik_llama.cpp's llama-bench")
    parser.add_argument("--isa", help="an instruction set for our kernels, as MARTLET_ISA takes it")
    parser.add_argument("--speed-only", action="store_true", help="decode and prefill alone")
    parser.add_argument("--models", type=Path, default=Path("~/.cache/martlet/models").expanduser())
    parser.add_argument("--text", type=Path, help="text for the perplexity (none: it is left out)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="these files in place of the four models")
    parser.add_argument("--only", nargs="*", choices=tuple(MODELS))
    parser.add_argument("--out", type=Path, default=Path("comparison"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
