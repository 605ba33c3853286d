"""What guessing tokens gives: decode speed with drafts ÷ without, in one run, alternating, on fixed
sets of prompts.

    python bench/speculation.py MODEL edit|prose|complete|chat|many
        [--draft auto|model=PATH|eagle=PATH] [--prompts 0:20] [--out FILE.json]

    edit      code to be printed again with a name changed, a parameter added or types written: much
              is copied
    prose     stories and explanations: nothing is
    chat      questions of many kinds, as people ask them: for a head
    complete  functions to be completed from their first lines: for a draft model
    many      16 answers of `prose` at once

Every prompt is answered greedily, off, on, off, on …, by one engine; answers must be equal to the
token. The speed is that of the tokens after the first one, so the prompt's own time, which drafts
do not change, does not count. A prompt's figure is the ratio of the medians; the set's is the ratio
of all tokens' time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from martlet import LLM, SamplingParams

SEED = 20
TOPICS = """a sailor who finds a lighthouse without a keeper|why the sky is blue|the first day of a baker|how bread rises
the history of the bicycle|a quarrel between two gardeners|what makes a good teacher|a train that never arrives|how tides work
the invention of printing|an old clockmaker and his apprentice|why cats purr|a letter to a friend abroad|the life of a river
how to learn a language|a city under the sea|why leaves change colour|a musician who lost her hearing|how a compass works
the last tree of an island"""
CODE = """def total_price(items, discount):
    total = 0.0
    for item in items:
        price = item["price"] * item["count"]
        if item.get("sale"):
            price = price * (1.0 - discount)
        total += price
    if total > 1000:
        total -= 50
    return round(total, 2)
§def read_table(path, separator):
    rows = []
    with open(path, encoding="utf-8") as file:
        header = file.readline().strip().split(separator)
        for line in file:
            values = line.strip().split(separator)
            if len(values) != len(header):
                raise ValueError("wrong number of columns")
            rows.append(dict(zip(header, values)))
    return rows
§def shortest_path(graph, start, goal):
    queue = [(0, start, [])]
    visited = set()
    while queue:
        queue.sort()
        cost, node, path = queue.pop(0)
        if node in visited:
            continue
        visited.add(node)
        path = path + [node]
        if node == goal:
            return cost, path
        for neighbour, weight in graph[node].items():
            queue.append((cost + weight, neighbour, path))
    return None
§class Stack:
    def __init__(self, limit):
        self.items = []
        self.limit = limit

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError("the stack is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        return self.items[-1] if self.items else None
§def word_counts(text, minimum):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    frequent = {word: count for word, count in counts.items() if count >= minimum}
    return sorted(frequent.items(), key=lambda pair: -pair[1])
§def merge_intervals(intervals, gap):
    result = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1] + gap:
            result[-1][1] = max(result[-1][1], stop)
        else:
            result.append([start, stop])
    return [tuple(interval) for interval in result]
§def matrix_product(left, right):
    n_rows, n_inner, n_columns = len(left), len(right), len(right[0])
    result = [[0] * n_columns for _ in range(n_rows)]
    for row in range(n_rows):
        for column in range(n_columns):
            value = 0
            for inner in range(n_inner):
                value += left[row][inner] * right[inner][column]
            result[row][column] = value
    return result"""
EDITS = (
    "Rename the variable `{name}` to `{other}` everywhere in this code. Print the whole new code and nothing else.",
    "Add a parameter `verbose=False` to the first function of this code, which prints its arguments when it is true."
    " Print the whole new code and nothing else.",
    "Add type annotations to this code. Print the whole new code and nothing else.",
)
CHAT = """What is the capital of Australia, and why is it not Sydney?
Explain to a child how a rainbow is made.
Give me five tips for sleeping better.
Write a short poem about an empty railway station.
What is the difference between a virus and a bacterium?
I have eggs, rice and spinach. What can I cook for dinner?
Summarise the plot of Romeo and Juliet in a few sentences.
How do I write a polite email to ask for a day off?
Write a Python function that counts the words in a file.
A train travels 180 kilometres in two hours and a half. What is its average speed?
List three advantages and three disadvantages of working from home.
Who was Marie Curie?
Rewrite this sentence in a formal tone: gimme the report by friday, thanks.
How does a refrigerator keep food cold?
Suggest names for a small bakery by the sea.
What should I see in Lisbon in two days?
Why did the Roman Empire fall?
Tell me a story about a fox who wanted to learn to swim.
How can I save money on my electricity bill?
Describe the water cycle step by step."""
NAMES = ("total", "rows", "queue", "items", "counts", "result", "result")
STARTS = '''def is_prime(n: int) -> bool:
    """Whether n is a prime number."""
§def fibonacci(n: int) -> list[int]:
    """The first n Fibonacci numbers."""
§def reverse_words(text: str) -> str:
    """The words of the text in reverse order."""
§def binary_search(values: list[int], target: int) -> int:
    """The index of target in sorted values, or -1."""
§class Queue:
    """A first-in, first-out queue of bounded size."""

    def __init__(self, limit: int) -> None:
§def flatten(nested: list) -> list:
    """All elements of a nested list, in order."""
§def quick_sort(values: list[int]) -> list[int]:
    """The values in ascending order."""
§def parse_csv(text: str) -> list[dict[str, str]]:
    """The rows of a CSV text with a header."""
§def levenshtein(a: str, b: str) -> int:
    """The edit distance of two strings."""
§def transpose(matrix: list[list[int]]) -> list[list[int]]:
    """The matrix with rows and columns exchanged."""
§class BankAccount:
    """An account with deposits and withdrawals."""

    def __init__(self, owner: str, balance: float = 0.0) -> None:
§def gcd(a: int, b: int) -> int:
    """The greatest common divisor."""
§def is_palindrome(text: str) -> bool:
    """Whether the text reads the same backwards, letters only."""
§def group_by_length(words: list[str]) -> dict[int, list[str]]:
    """The words by their length."""
§def moving_average(values: list[float], window: int) -> list[float]:
    """The mean of each window of values."""
§def depth_first(graph: dict[str, list[str]], start: str) -> list[str]:
    """The nodes in the order in which a depth-first search meets them."""
§def roman(number: int) -> str:
    """A number from 1 to 3999 as a Roman numeral."""
§class Matrix:
    """A matrix of floats."""

    def __init__(self, rows: list[list[float]]) -> None:
§def count_vowels(text: str) -> dict[str, int]:
    """How often each vowel is in the text."""
§def merge_sorted(a: list[int], b: list[int]) -> list[int]:
    """Two sorted lists merged into one."""
'''


@dataclass
class Pair:
    """A prompt's measurements: seconds of each run after the first token, and the tokens."""

    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    n_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    pauses: int = 0

    @property
    def ratio(self) -> float:
        """On ÷ off, in tokens a second."""
        return statistics.median(self.off) / statistics.median(self.on)


def main() -> None:
    """Measure and print."""
    args = _arguments()
    first, _, stop = args.prompts.partition(":")
    options: dict[str, Any] = {"threads": args.threads, "max_context": 1024, "draft": args.draft}
    with LLM(str(args.model), **options) as llm:
        prompts = prompts_of("prose" if args.task == "many" else args.task)[int(first) : int(stop)]
        if args.task == "many":
            pairs = [many(llm, prompts, args)]
        else:
            pairs = [one(llm, prompt, args, number) for number, prompt in enumerate(prompts, int(first))]
        totals = llm.engine.totals.speculation
        report = _report(pairs, args)
        report["by position"] = [[n, right] for n, right in zip(totals.drafted, totals.accepted, strict=True)]
        report["estimated gain, s"] = totals.gain_s
    print(json.dumps({key: value for key, value in report.items() if key != "runs"}, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1))


def prompts_of(task: str) -> list[str]:
    """The fixed set of 20."""
    rng = random.Random(SEED)
    if task == "chat":
        return CHAT.splitlines()
    if task == "complete":
        return STARTS.split("§")
    if task == "prose":
        return [f"Write three paragraphs about {topic}." for topic in TOPICS.replace("\n", "|").split("|")]
    made = [(code, edit, name) for code, name in zip(CODE.split("§"), NAMES, strict=True) for edit in EDITS]
    rng.shuffle(made)
    others = ("amount", "records", "pending", "entries", "tally", "output")
    return [
        f"{edit.format(name=name, other=rng.choice(others))}\n\n```python\n{code}```\n"
        for code, edit, name in made[:20]
    ]


def one(llm: LLM, prompt: str, args: argparse.Namespace, number: int) -> Pair:
    """Answer a prompt off and on by turns."""
    pair, answers = Pair(), []
    answer(llm, [prompt], args, 0, n_tokens=2)  # its prefix is in the cache from here on
    for _ in range(args.rounds):
        for seconds, draft in ((pair.off, 0), (pair.on, None)):
            [output] = answer(llm, [prompt], args, draft)
            metrics = output.metrics
            taken, n_pauses = _decode_s(metrics.gaps_s)
            seconds.append(taken)
            pair.pauses += n_pauses
            answers.append(output.outputs[0].token_ids)
            pair.n_tokens = metrics.n_generated
            pair.drafted, pair.accepted = metrics.n_drafted, metrics.n_accepted
    assert all(ids == answers[0] for ids in answers), f"prompt {number}: the answer differs"
    print(
        f"{number}: {pair.n_tokens} tokens, {statistics.median(pair.off):.2f} s off, ÷ {pair.ratio:.3f};"
        f" {pair.accepted} of {pair.drafted} guesses right",
        flush=True,
    )
    return pair


def _decode_s(gaps: Sequence[float]) -> tuple[float, int]:
    """The time between the first token and the last; a gap of over ten usual ones, when the process
    did not run, counts as one.
    """
    usual = statistics.median(gap for gap in gaps if gap > 0)
    return sum(gap if gap < 10 * usual else usual for gap in gaps), sum(gap >= 10 * usual for gap in gaps)


def many(llm: LLM, prompts: list[str], args: argparse.Namespace) -> Pair:
    """16 answers at once, off and on by turns: the time of all of it, prompts from the cache."""
    pair, answers = Pair(), []
    asked = [prompts[i % len(prompts)] for i in range(16)]
    answer(llm, asked, args, 0, n_tokens=2)
    for _ in range(args.rounds):
        for seconds, draft in ((pair.off, 0), (pair.on, None)):
            start = time.perf_counter()
            outputs = answer(llm, asked, args, draft)
            seconds.append(time.perf_counter() - start)
            answers.append([output.outputs[0].token_ids for output in outputs])
            pair.n_tokens = sum(map(len, answers[-1]))
            pair.drafted = sum(output.metrics.n_drafted for output in outputs)
            pair.accepted = sum(output.metrics.n_accepted for output in outputs)
    assert all(ids == answers[0] for ids in answers), "an answer differs"
    return pair


def answer(
    llm: LLM, prompts: list[str], args: argparse.Namespace, draft: int | None, n_tokens: int | None = None
) -> Any:
    """Greedy answers."""
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens or args.tokens, draft_tokens=draft)
    if args.task == "complete":
        return llm.generate(prompts, params)
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)


def _report(pairs: list[Pair], args: argparse.Namespace) -> dict[str, Any]:
    ratios = [pair.ratio for pair in pairs]
    off, on = (sum(statistics.median(getattr(pair, name)) for pair in pairs) for name in ("off", "on"))
    return {
        "model": args.model.stem,
        "task": args.task,
        "draft": args.draft.partition("=")[0],
        "on ÷ off": off / on,
        "worst": min(ratios),
        "tokens": sum(pair.n_tokens for pair in pairs),
        "guesses": sum(pair.drafted for pair in pairs),
        "right": sum(pair.accepted for pair in pairs),
        "pauses": sum(pair.pauses for pair in pairs),
        "runs": [vars(pair) for pair in pairs],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("task", choices=("edit", "prose", "complete", "chat", "many"))
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", default="0:20", help="part of the set, as 0:5")
    parser.add_argument("--tokens", type=int, default=200, help="most of an answer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
