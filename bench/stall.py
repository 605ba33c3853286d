"""A long prompt beside streams that decode: `python bench/stall.py MODEL [--prompt 4000] [--streams
4] [--rounds 3]`.

Prints the gaps between the streams' tokens while the prompt was computed, as multiples of the
steady gap before it came, and of what the streams alone take at the length that they have then: it
grows with them, and is taken to do so evenly between the steady gaps before and after. Then the
longest steps: what of the prompt they computed, and their parts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics

from martlet import LLM, SamplingParams
from martlet.engine.engine import Engine
from martlet.metrics import Observer, StepRecord
from martlet.types import Request

LONG = "long"
STEADY, SHOWN = 150, 5  # steps of the streams alone, before and after; of the longest steps


class Steps(Observer):
    """Keeps the record of every step."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def stepped(self, record: StepRecord) -> None:
        """One more."""
        self.records.append(record)


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--stall-ms", type=float)
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("threads", "stall_ms") if getattr(args, name) is not None}
    with LLM(args.model, max_context=2 * args.prompt, max_seqs=args.streams + 1, draft="off", **options) as llm:
        steps = Steps()
        llm.engine.watch(steps)
        gc.freeze()  # as the server does
        for number in range(args.rounds):
            steps.records.clear()
            one_round(llm.engine, args.streams, args.prompt, random.Random(number))
            report(steps.records, number)


def one_round(engine: Engine, n_streams: int, n_prompt: int, rng: random.Random) -> None:
    """STEADY steps of the streams, then the prompt, which ends with its first token, and STEADY
    steps more.
    """

    def add(name: str, count: int) -> None:
        ids = tuple(rng.randrange(1000, 40000) for _ in range(count))
        n_answer = 1 if name == LONG else n_prompt
        engine.add(Request(name, ids, SamplingParams(max_tokens=n_answer, temperature=0, ignore_eos=True)))

    for stream in range(n_streams):
        add(f"stream {stream}", 64)
    for _ in range(STEADY):
        engine.step()
    add(LONG, n_prompt)
    while not any(event.request_id == LONG for event in engine.step()):
        pass
    for _ in range(STEADY):
        engine.step()
    engine.clear()


def report(records: list[StepRecord], number: int) -> None:
    """A step that gives every stream a token ends a gap, which began with the end of the step
    before.
    """
    beside = [i for i, record in enumerate(records) if any(span.request_id == LONG for span in record.spans)]
    first, last = beside[0], beside[-1]
    ends = [record.end_s for record in records]
    # gaps[i] ends with step i + 1
    gaps = [end - before for before, end in itertools.pairwise(ends)]
    before, after, during = gaps[first - 51 : first - 1], gaps[last + 1 : last + 51], gaps[first - 1 : last]
    steady, later = statistics.median(before), statistics.median(after)
    growth = (later - steady) / len(during)
    print(
        f"round {number}: steady {1e3 * steady:.2f} ms (longest of 50: {max(before) / steady:.2f} ×), after the prompt {1e3 * later:.2f} ms;"
        f" first token after {ends[last] - ends[first - 1]:.2f} s in {len(during)} steps"
    )
    print(f"    beside the prompt, of the steady gap: {_spread([gap / steady for gap in during])}")
    print(
        f"    of the streams' own at that length: {_spread([gap / (steady + growth * i) for i, gap in enumerate(during)])}"
    )
    for gap, i in sorted(((gap, i) for i, gap in enumerate(during, first)), reverse=True)[:SHOWN]:
        record = records[i]
        parts = ", ".join(f"{name} {1e3 * getattr(record, name + '_s'):.1f}" for name in ("plan", "run", "commit"))
        print(f"    {1e3 * gap:6.1f} ms  step {i - first:>4}: {_chunk(record)}; {parts}")


def _spread(ratios: list[float]) -> str:
    ordered = sorted(ratios)
    p99 = ordered[int(0.99 * len(ordered))]
    return f"median {statistics.median(ordered):.2f} ×, p99 {p99:.2f} ×, longest {ordered[-1]:.2f} ×"


def _chunk(record: StepRecord) -> str:
    """What a step computed of the prompt."""
    for shown, span in zip(record.spans, record.plan.spans, strict=True):
        if shown.request_id == LONG:
            layers = f", layers {span.first_layer} to {span.stop_layer or 'the last'}" if span.is_layered else ""
            return f"{span.count:>3} rows from {span.start:>5,}{layers}"
    return "nothing of the prompt"


if __name__ == "__main__":
    main()
