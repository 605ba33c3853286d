"""Tokenizer throughput against the `tokenizers` library (Rust), one thread, on English prose.

    python bench/tokenizer.py [MODEL.gguf …]

Both encode the same text in one call, by turns; medians are printed, warm (the words of the text
seen before) and cold (a new tokenizer each time, construction not counted). Both must give the same
ids, or the numbers are refused. The text is the language reference inside Python's standard library
(`pydoc_data.topics`, some 450 KB), or --text FILE. Without a model the GPT-2, Qwen2 and Llama
vocabularies of tests/data are used.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from gguf import GGUFReader
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from martlet.tokenizer import split
from martlet.tokenizer.tokenizer import Tokenizer as Martlet

VOCABS = Path(__file__).parent.parent / "tests" / "data" / "tokenizer"


def metadata_of(path: Path) -> dict[str, Any]:
    if path.suffix == ".xz":
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "vocab.gguf"
            plain.write_bytes(lzma.decompress(path.read_bytes()))
            return metadata_of(plain)
    return {key: field.contents() for key, field in GGUFReader(path).fields.items() if key.startswith("tokenizer.")}


def library_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The same tokenizer for the library."""
    texts = metadata["tokenizer.ggml.tokens"]
    ids = {text: token for token, text in enumerate(texts)}
    if metadata["tokenizer.ggml.model"] == "gpt2":
        merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
        made = Tokenizer(models.BPE(ids, merges))
        rules = [
            pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in split.PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]].patterns
        ]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*rules, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        return made
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    normal = {text: token for token, text in enumerate(texts) if types[token] == 1}
    cuts = ((text, cut) for text in normal for cut in range(1, len(text)))
    pairs = [(text[:cut], text[cut:]) for text, cut in cuts if text[:cut] in normal and text[cut:] in normal]
    pairs.sort(key=lambda pair: -scores[normal[pair[0] + pair[1]]])
    unk = texts[metadata["tokenizer.ggml.unknown_token_id"]]
    made = Tokenizer(models.BPE(ids, pairs, unk_token=unk, byte_fallback=True, fuse_unk=True))
    lead = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*lead, normalizers.Replace(" ", "▁")])
    made.add_tokens([text for text, kind in zip(texts, types, strict=True) if kind == 4])
    return made


def seconds(encode: Callable[[], object]) -> float:
    start = time.perf_counter()
    encode()
    return time.perf_counter() - start


def measure(path: Path, text: str, runs: int) -> dict[str, float]:
    metadata = metadata_of(path)
    load_s = statistics.median(seconds(lambda: Martlet.from_gguf(metadata)) for _ in range(5))
    library = library_tokenizer(metadata)
    rust = library.to_str()
    ours = Martlet.from_gguf(metadata)
    if ours.encode(text, add_special=False) != library.encode(text, add_special_tokens=False).ids:
        sys.exit(f"{path}: the two give different ids; a comparison of their speed would mean nothing")
    times: dict[str, list[float]] = {"ours": [], "library": [], "ours cold": [], "library cold": []}
    for _ in range(runs):
        times["ours"].append(seconds(lambda: ours.encode(text, add_special=False)))
        times["library"].append(seconds(lambda: library.encode(text, add_special_tokens=False).ids))
    for _ in range(min(runs, 3)):
        cold, cold_library = Martlet.from_gguf(metadata), Tokenizer.from_str(rust)
        times["ours cold"].append(seconds(lambda: cold.encode(text, add_special=False)))  # noqa: B023
        times["library cold"].append(
            seconds(lambda: cold_library.encode(text, add_special_tokens=False).ids)  # noqa: B023
        )
    size_mb = len(text.encode()) / 1e6
    return {"load_ms": load_s * 1e3} | {name: size_mb / statistics.median(some) for name, some in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.text is None:
        from pydoc_data import topics

        text = "\n\n".join(topics.topics.values())
    else:
        text = given.text.read_text(encoding="utf-8")
    rows = {path.name: measure(path, text, given.runs) for path in given.models or sorted(VOCABS.glob("*.gguf.xz"))}
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        f"{len(text.encode()) / 1e6:.2f} MB of text; MB/s, median of {given.runs}; cold: median of {min(given.runs, 3)}"
    )
    print(f"{'vocabulary':36}{'load':>9}{'ours':>8}{'library':>9}{'ratio':>8}{'cold':>8}{'library':>9}{'ratio':>8}")
    for name, row in rows.items():
        warm, cold = row["ours"] / row["library"], row["ours cold"] / row["library cold"]
        print(
            f"{name:36}{row['load_ms']:6.0f} ms{row['ours']:8.2f}{row['library']:9.2f}{warm:8.2f}"
            f"{row['ours cold']:8.2f}{row['library cold']:9.2f}{cold:8.2f}"
        )


if __name__ == "__main__":
    main()
