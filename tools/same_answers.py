"""Record what models answer, to the bit, and compare the records of two trees of code.

    python tools/same_answers.py record before.json                              # all models
    python tools/same_answers.py record before.json --models tiny smollm2-135m   # the quick form
    python tools/same_answers.py compare before.json after.json

To record another tree, run it from that tree's folder with PYTHONPATH=that folder; the file says
which code it was.

`record` asks each model a fixed list of requests in several engines (KV types, drafters, adapters,
little memory, …). Of every request it stores the prompt's ids, the answers' ids, texts and ends,
and every log-probability as a hexadecimal float. It uses the public API only, so one script serves
both trees. The tiny models and the adapters are random; they are written once into --folder, with
the code of tests/models, and read again after that: both trees see the same files.

`compare` prints each request that differs and where it differs first, and exits with 1 if there is
one or if a file lacks a request of the other. How often something happened (a preemption, a guess
that was right) may depend on the time that steps took. It is not compared, but what a session is
there for and has not happened is noted: then less was tested.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import martlet
from martlet import LLM, BeamSearchParams, LoRARequest, MartletError, SamplingParams, Scheduling

ROOT = Path(__file__).resolve().parents[1]
MODELS_FOLDER = Path(os.environ.get("MARTLET_TEST_MODELS") or "~/.cache/martlet/models").expanduser()
MOST_ENTRIES = 64  # of a token's log-probabilities that are stored; of more, a digest
COUNTERS = ("n_cached", "n_loaded", "n_preempted", "n_drafted", "n_accepted")
Row = dict[str, Any]


# -- models ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Model:
    """A model by its name here. Tiny ones have bytes as tokens, and a context of 256."""

    name: str
    file: str  # in MODELS_FOLDER; of a tiny one in --folder
    kv_bytes: int  # of a position, float16
    case: str = ""  # of tests/models/tiny.py
    drafter: str = ""  # the name of the model that guesses for it
    head: str = ""  # what `eagle=` takes

    @property
    def tiny(self) -> bool:
        """Whether it is written here."""
        return bool(self.case)


MODELS = {
    model.name: model
    for model in (
        Model("tiny-gemma3", "tiny-gemma3.gguf", 896, case="gemma3", drafter="tiny-gemma3"),
        Model("tiny-phi3", "tiny-phi3", 336, case="phi3", drafter="tiny-phi3"),
        Model("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf", 23040, head="smollm2-135m"),
        Model("gemma3-270m", "gemma-3-270m-q4_k_m.gguf", 18432),
        Model("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b.gguf", 12288),
        Model("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b.gguf", 28672, drafter="qwen2.5-coder-0.5b"),
    )
}
WINDOW = 40  # of the tiny models: longer than a page, and shorter than the long prompts
TINY_VOCAB, TINY_END = 258, 256
PEFT_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def path_of(model: Model, folder: Path) -> Path:
    """Where the model is; a tiny one is written if it is not there."""
    path = (folder if model.tiny else MODELS_FOLDER) / model.file
    if model.tiny and not path.exists():
        _write_once(path, partial(_write_tiny, model))
    if not path.exists():
        raise SystemExit(f"{path} is not there: fetch it with `martlet pull {model.name}`.")
    return path


def adapters_of(model: Model, folder: Path) -> dict[str, str]:
    """Two random adapters as PEFT saves them: of all products, and of some."""
    found = {}
    for name, rank, some in (("one", 4, ""), ("two", 7, r"q_proj v_proj qkv_proj down_proj")):
        path = folder / f"{model.name}-adapter-{name}"
        if not path.exists():
            shapes = _product_shapes(path_of(model, folder))
            wanted = {key: shape for key, shape in shapes.items() if not some or key.rsplit(".", 1)[1] in some.split()}
            size = 0.3 if model.tiny else 0.02
            _write_once(path, partial(_write_adapter, shapes=wanted, rank=rank, size=size))
        found[name] = str(path)
    return found


def _write_once(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or folder beside its place and move it there: nobody sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as around:
        made = Path(around) / path.name
        write(made)
        if not path.exists():
            os.rename(made, path)


def _write_tiny(model: Model, path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "models"))
    import tiny  # type: ignore[import-not-found]  # of tests/models

    config, tensors, _ = tiny.golden(model.case)
    shapes = {name: [TINY_VOCAB if n == tiny.V else n for n in values.shape] for name, values in tensors.items()}
    values = {name: np.ascontiguousarray(array) for name, array in tiny.weights(model.case, shapes).items()}
    config |= {"vocab_size": TINY_VOCAB, "max_position_embeddings": 256, "sliding_window": WINDOW}
    config |= {"bos_token_id": None, "eos_token_id": TINY_END, "pad_token_id": None}
    if path.suffix == ".gguf":
        tiny.write_gguf(config, values, path, _add_tokenizer)
    else:
        tiny.write_hf(config, values, path)
        (path / "tokenizer.json").write_text(json.dumps(_tokenizer_json()))


def _letters() -> list[str]:
    """GPT-2's letters for the bytes."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = {byte: chr(256 + number) for number, byte in enumerate(b for b in range(256) if b not in kept)}
    return [rest.get(byte, chr(byte)) for byte in range(256)]


def _add_tokenizer(writer: Any) -> None:
    """The 256 bytes, an end token and one pair."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_letters(), "<|end|>", "th"])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["t h"])


def _tokenizer_json() -> Row:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": TINY_END, "content": "<|end|>", "special": True, **flags}],
        "pre_tokenizer": level,
        "decoder": level,
        "normalizer": None,
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": {letter: byte for byte, letter in enumerate(_letters())} | {"th": 257},
            "merges": [["t", "h"]],
        },
    }


def _product_shapes(path: Path) -> dict[str, tuple[int, int]]:
    """Rows and columns of each product of a layer, by PEFT's module names."""
    if path.is_dir():
        from safetensors.numpy import load_file

        tensors = load_file(path / "model.safetensors")
        return {
            name.removesuffix(".weight"): (values.shape[0], values.shape[1])
            for name, values in tensors.items()
            if ".layers." in name and values.ndim == 2
        }
    import gguf

    shapes = {}
    for tensor in gguf.GGUFReader(path).tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and parts[2] in PEFT_NAMES and parts[3] == "weight":
            columns, rows = (int(n) for n in tensor.shape)
            shapes[f"model.layers.{parts[1]}.{PEFT_NAMES[parts[2]]}"] = rows, columns
    return shapes


def _write_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, size: float) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(zlib.crc32(folder.name.encode()))
    tensors = {}
    for name, (rows, columns) in sorted(shapes.items()):
        a = rng.standard_normal((rank, columns)) / columns**0.5
        b = rng.standard_normal((rows, rank)) * size
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config))


# -- what is stored --------------------------------------------------------------------------------
def _entries(logprobs: Mapping[int, Any] | None) -> Any:
    """A token's log-probabilities as [id, rank, exact value, text].

    Of very many the first few, and a digest of all.
    """
    if logprobs is None:
        return None
    rows = [
        [int(token_id), entry.rank, float(entry.logprob).hex(), entry.decoded_token]
        for token_id, entry in logprobs.items()
    ]
    if len(rows) <= MOST_ENTRIES:
        return rows
    digest = hashlib.sha256()
    for token_id, rank, value, text in rows:
        digest.update(struct.pack("<qqd", token_id, -1 if rank is None else rank, float.fromhex(value)))
        digest.update(text.encode("utf-8", "surrogatepass"))
    return [*rows[:MOST_ENTRIES], [len(rows), digest.hexdigest()]]


def _lists(several: Sequence[Mapping[int, Any] | None] | None) -> list[Any] | None:
    return None if several is None else [_entries(logprobs) for logprobs in several]


def _completion(answer: Any) -> Row:
    total = answer.cumulative_logprob
    return {
        "ids": list(map(int, answer.token_ids)),
        "logprobs": _lists(answer.logprobs),
        "sum": None if total is None else float(total).hex(),
        "text": answer.text,
        "finish": answer.finish_reason,
        "stop": answer.stop_reason,
    }


def _output(output: Any) -> Row:
    return {
        "prompt_ids": list(map(int, output.prompt_token_ids)),
        "prompt_logprobs": _lists(output.prompt_logprobs),
        "answers": [_completion(answer) for answer in output.outputs],
        "error": output.error,
        "warnings": list(output.warnings),
    }


def _beams(output: Any) -> Row:
    return {
        "prompt_ids": list(map(int, output.prompt_token_ids)),
        "answers": [
            {
                "ids": list(map(int, beam.token_ids)),
                "sum": float(beam.cum_logprob).hex(),
                "text": beam.text,
                "finish": beam.finish_reason,
                "stop": beam.stop_reason,
            }
            for beam in output.sequences
        ],
    }


# -- asking ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ask:
    """A prompt with what is asked of it; a batch has several by name."""

    prompt: Any
    params: Mapping[str, Any] = field(default_factory=dict)
    lora: Any = None
    wish: Scheduling | None = None

    def sampling(self) -> SamplingParams:
        """Greedy, a dozen tokens and two log-probabilities, unless it says otherwise."""
        return SamplingParams(**{"temperature": 0, "max_tokens": 12, "logprobs": 2, **self.params})


class Recorder:
    """Asks one engine and keeps the answers by name."""

    def __init__(
        self,
        model: Model,
        session: str,
        llm: LLM,
        folder: Path,
        requests: dict[str, Row],
        seen: dict[str, int],
    ) -> None:
        self.model = model
        self.llm = llm
        self.folder = folder
        self._session = session
        self._requests = requests
        self._seen = seen

    def text(self, text: str) -> str:
        """A prompt that the model has room for."""
        return text[:90] if self.model.tiny else text

    def ids(self, seed: int, count: int) -> list[int]:
        """Random ids of the vocabulary's first, common part."""
        rng = random.Random(seed)
        return [rng.randrange(3, 255) if self.model.tiny else rng.randrange(300, 9000) for _ in range(count)]

    def each(self, asks: Mapping[str, Ask]) -> None:
        """One request at a time."""
        for name, ask in asks.items():
            self.together({name: ask})

    def together(self, asks: Mapping[str, Ask]) -> None:
        """All at once."""
        several = list(asks.values())

        def answer() -> list[Any]:
            return self.llm.generate(
                [ask.prompt for ask in several],
                [ask.sampling() for ask in several],
                scheduling=[ask.wish or Scheduling() for ask in several],
                lora_request=[ask.lora for ask in several],
            )

        self._keep(list(asks), answer, _output)

    def chat(self, name: str, messages: Sequence[Mapping[str, Any]], ask: Ask, **options: Any) -> str:
        """A conversation's next answer; its text, to go on from."""

        def answer() -> list[Any]:
            return self.llm.chat(messages, ask.sampling(), scheduling=ask.wish, lora_request=ask.lora, **options)

        found = self._keep([name], answer, _output)
        return str(found[0].outputs[0].text) if found else ""

    def beams(self, asks: Mapping[str, Any], lora: str | None = None, **params: Any) -> None:
        """A beam search of each prompt."""
        prompts = list(asks.values())
        wanted = BeamSearchParams(**params)
        self._keep(list(asks), lambda: self.llm.beam_search(prompts, wanted, lora_request=lora), _beams)

    def embed(self, asks: Mapping[str, Any]) -> None:
        """The prompts' embeddings."""
        prompts = list(asks.values())
        self._keep(
            list(asks),
            lambda: self.llm.encode(prompts),
            lambda output: {
                "prompt_ids": list(map(int, output.prompt_token_ids)),
                "embedding": np.asarray(output.embedding, "<f4").tobytes().hex(),
            },
        )

    def stream(self, name: str, ask: Ask, meanwhile: Callable[[], object] = lambda: None) -> None:
        """An answer piece by piece; after the first one something else is asked."""

        def answer() -> list[Any]:
            with self.llm.stream(ask.prompt, ask.sampling(), scheduling=ask.wish, lora_request=ask.lora) as stream:
                pieces = [next(stream, "")]
                meanwhile()
                pieces += list(stream)
                return [("".join(pieces), stream.result)]

        self._keep([name], answer, lambda found: {"pieces": found[0], **_output(found[1])})

    def _keep(
        self, names: Sequence[str], answer: Callable[[], Sequence[Any]], row: Callable[[Any], Row]
    ) -> Sequence[Any]:
        full = [f"{self._session}/{name}" for name in names]
        repeated = [name for name in full if name in self._requests]
        assert not repeated, repeated
        try:
            found = answer()
        except MartletError as error:
            self._requests.update((name, {"raised": f"{type(error).__name__}: {error}"}) for name in full)
            return []
        for name, output in zip(full, found, strict=True):
            self._requests[name] = row(output)
            metrics = getattr(output, "metrics", None)
            for counter in COUNTERS:
                key = f"{self._session} {counter}"
                self._seen[key] = self._seen.get(key, 0) + (getattr(metrics, counter, 0) or 0)
        return found


# -- what is asked ---------------------------------------------------------------------------------
TEXTS = (
    "Once upon a time there was a small dog who",
    "def fibonacci(n):\n    ",
    "The capital of France is Paris. The capital of Italy is",
    "Here is a list of five fruits:\n1. apple\n2.",
    "import numpy as np\n\n\nclass Matrix:\n    def __init__(self, rows, columns):",
    "Übung macht den Meister — naïve café, 東京, emoji 🙂: ",
)
STORY = (
    "The lighthouse stood at the end of the long grey pier, and every evening the keeper climbed its one hundred and"
    " twelve steps to light the lamp. He had done so for thirty years, in storms and in still summer nights, and he knew"
    " the sound of every stair. One evening, in the autumn of his last year, he heard a step behind him on the stairs,"
)
CODE = (
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
    "    return width * height * depth\n\n\ndef area(width, height):\n    return"
)
JSON_FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "direction": {"enum": ["north", "south", "east"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["name", "age", "direction", "tags"],
    "additionalProperties": False,
}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "schema": {"json": JSON_FORM},
    "schema any": {"json": {**JSON_FORM, "additionalProperties": True}, "whitespace": "any", "ordered": False},
    "limited": {"json": {"type": "array", "items": {"type": "string"}, "minItems": 2}, "string_limit": 5},
    "object": {"json_object": True, "whitespace": "single"},
    "regex": {"regex": r"[A-Z][a-z]{2,8}( [a-z]{2,8}){2,4}\."},
    "date": {"json": {"type": "string", "format": "date"}},
    "choice": {"choice": ("yes", "no", "perhaps not", "perhaps later")},
    "gbnf": {"grammar": 'root ::= ("step " [0-9] " of " [0-9]{2} ": " ("stop" | "go on") "\\n"){1,2}'},
    "lark": {"grammar": 'start: pair ~ 2\npair: KEY "=" KEY ";"\nKEY: /[a-z]{3,5}/'},
    "tags": {
        "tags": [{"begin": "<call>", "schema": json.dumps(JSON_FORM), "end": "</call>"}],
        "at_least_one": True,
        "after": "</think>",
        "after_begin": "<think>",
    },
}
SAMPLED: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 0.8, "seed": 1},
    "hot": {"temperature": 1.6, "seed": 2},
    "no seed": {"temperature": 1.0},
    "negative seed": {"temperature": 1.0, "seed": -5, "logprobs": None},
    "top k": {"temperature": 1.2, "top_k": 40, "seed": 3},
    "top p": {"temperature": 1.0, "top_p": 0.9, "seed": 4},
    "top p 0": {"temperature": 1.0, "top_p": 0.0, "seed": 4},
    "min p": {"temperature": 1.1, "min_p": 0.05, "seed": 5},
    "typical p": {"temperature": 1.0, "typical_p": 0.8, "seed": 6},
    "top n sigma": {"temperature": 1.3, "top_n_sigma": 1.5, "seed": 7},
    "xtc": {"temperature": 1.0, "xtc_probability": 0.6, "xtc_threshold": 0.05, "seed": 8},
    "dynatemp": {"temperature": 1.0, "dynatemp_range": 0.5, "dynatemp_exponent": 1.4, "seed": 9},
    "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "seed": 10},
    "dry": {"temperature": 0.7, "dry_multiplier": 0.9, "dry_allowed_length": 1, "seed": 11},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.9, "temperature": 0.6, "seed": 12},
    "frequency": {"frequency_penalty": 0.8, "penalty_last_n": 6},
    "order": {
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "samplers": ("temperature", "min_p", "top_p", "top_k", "penalties"),
        "seed": 13,
    },
    "everything": {
        "temperature": 0.9,
        "top_k": 80,
        "top_p": 0.97,
        "min_p": 0.005,
        "typical_p": 0.98,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "dry_multiplier": 0.5,
        "seed": 14,
    },
    "bias": {"logit_bias": {n: ((n * 37) % 41 - 20) / 5 for n in range(20, 250)}},
    "ban": {"logit_bias": dict.fromkeys(range(30, 250), -100.0), "temperature": 1.0, "seed": 15},
    "allowed": {"allowed_token_ids": tuple(range(35, 250, 3)), "logprobs_mode": "allowed"},
    "bad words": {"bad_words": ("the", " the", " a", "return", "\n", " of"), "no_repeat_ngram_size": 2},
    "processed": {"temperature": 0.7, "top_k": 20, "logprobs_mode": "processed", "logprobs": 5, "seed": 16},
    "stop": {"stop": ("an", " i", "\n\n", "1"), "temperature": 0.9, "seed": 17},
    "stop shown": {"stop": ["e", "r "], "include_stop_str_in_output": True, "min_tokens": 4},
    "stop ids": {"stop_token_ids": tuple(range(200, 258)), "min_tokens": 3, "temperature": 1.0, "seed": 18},
    "no end": {"ignore_eos": True, "temperature": 1.0, "seed": 19, "skip_special_tokens": False},
    "three": {"n": 3, "temperature": 1.0, "seed": 20, "max_tokens": 8},
    "best": {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 21, "max_tokens": 8},
    "best alone": {"best_of": 3, "temperature": 1.0, "logprobs": None, "seed": 22, "max_tokens": 6},
    "no text": {"detokenize": False, "max_tokens": 5},
}


def ask_plainly(r: Recorder) -> None:
    """What a request can say, one at a time and many at once; repeats and shared beginnings."""
    texts = [r.text(text) for text in TEXTS]
    story = r.text(STORY)
    r.each({f"greedy {i}": Ask(text, {"logprobs": None} if i % 2 else {"logprobs": 3}) for i, text in enumerate(texts)})
    r.each(
        {
            "again": Ask(texts[0], {"logprobs": 3}),
            "longer": Ask(texts[0], {"max_tokens": 24}),
            "story": Ask(story),
            "story goes on": Ask(story + " and he turned.", {"temperature": 0.9, "seed": 1}),
            "story otherwise": Ask(story[:-9] + "cat on the", {"logprobs": 0}),
            "story alone": Ask({"prompt": story, "cache_salt": "mine"}),
            "ids": Ask(r.ids(1, 40)),
            "prompt scores": Ask(story, {"prompt_logprobs": 2}),
            "prompt only": Ask(texts[1], {"prompt_logprobs": 0, "max_tokens": 0}),
            "all scores": Ask(texts[2], {"logprobs": -1, "max_tokens": 2, "temperature": 1.0, "seed": 3}),
            "all prompt scores": Ask(r.ids(2, 2), {"prompt_logprobs": -1, "max_tokens": 1}),
            "truncated": Ask(story, {"truncate_prompt_tokens": 7}),
            "too long": Ask(r.ids(3, 1200)),
            "nothing allowed": Ask(texts[0], {"structured": {"choice": ("yes", "no")}, "allowed_token_ids": (40,)}),
        }
    )
    r.together({name: Ask(texts[i % 5], params) for i, (name, params) in enumerate(SAMPLED.items())})
    tokens = {"max_tokens": 40 if r.model.tiny else 24}
    r.together(
        {name: Ask(texts[i % 2], {"structured": form, **tokens}) for i, (name, form) in enumerate(FORMS.items())}
        | {
            f"{name} sampled": Ask(texts[0], {"structured": FORMS[name], "temperature": 1.0, "seed": i, **tokens})
            for i, name in enumerate(("schema", "regex", "gbnf", "choice"))
        }
        | {"schema twice": Ask(texts[0], {"structured": FORMS["schema"], "n": 2, "temperature": 1.1, "seed": 9})}
    )
    ask_chat(r)
    r.beams({"beams 0": texts[0], "beams 1": texts[1]}, beam_width=3, max_tokens=6)
    r.beams({"short beams": texts[2]}, beam_width=2, max_tokens=5, length_penalty=-1.0, ignore_eos=True)
    r.beams({"held beams": texts[0]}, beam_width=3, max_tokens=6, structured=FORMS["regex"])
    r.embed({"embedding": texts[0], "embedding of ids": r.ids(4, 5), "long embedding": story})
    r.stream("stream", Ask(texts[3], {"temperature": 0.8, "seed": 5, "stop": ("melon",)}))


def ask_chat(r: Recorder) -> None:
    """A conversation of three turns, one whose last message is gone on with, one with tools."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
    ]
    for number, question in enumerate(("Another one?", "Why?", "")):
        ask = Ask(None, {"temperature": number * 0.6, "seed": number, "max_tokens": 10})
        turns.append({"role": "assistant", "content": r.chat(f"chat {number}", turns, ask)})
        turns.append({"role": "user", "content": question})
    begun = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    r.chat("chat goes on", begun, Ask(None), continue_final_message=True, add_generation_prompt=False)
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    r.chat("chat with tools", begun[:1], Ask(None), tools=[{"type": "function", "function": function}])


def ask_long(r: Recorder) -> None:
    """Prompts of several pages and groups of positions: of each KV type."""
    story, code = r.text(STORY), r.text(CODE)
    r.together(
        {
            "story": Ask(story, {"max_tokens": 24}),
            "ids": Ask(r.ids(5, 140), {"max_tokens": 16, "temperature": 1.0, "seed": 1}),
            "three": Ask(code, {"n": 3, "temperature": 1.0, "seed": 2, "logprobs": None}),
            "held": Ask(code, {"structured": FORMS["schema"], "max_tokens": 20}),
        }
    )
    r.each(
        {
            "story again": Ask(story, {"prompt_logprobs": 1, "max_tokens": 4}),
            "ids go on": Ask([*r.ids(5, 140), *r.ids(6, 9)], {"temperature": 0.7, "seed": 3}),
            "ids otherwise": Ask([*r.ids(5, 75), *r.ids(7, 30)], {"max_tokens": 20}),
        }
    )
    r.beams({"beams": code}, beam_width=2, max_tokens=4)
    r.embed({"embedding": story})


def ask_tightly(r: Recorder) -> None:
    """Little memory and small steps: sequences lose their pages and are computed again."""
    asks: dict[str, Ask] = {}
    for i in range(6):
        params: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        params |= ({}, {"temperature": 1.0, "seed": i}, {"logprobs": None}, {"prompt_logprobs": 1})[i % 4]
        if i == 4:
            params |= {"n": 2, "max_tokens": 20}
        count = 60 if i == 3 else 25 + i  # most grow from one page to three
        asks[str(i)] = Ask(r.ids(10 + i, count), params, wish=Scheduling(priority=-i, tenant="ab"[i % 2]))
    asks["held"] = Ask(r.ids(9, 20), {"structured": FORMS["schema"], "max_tokens": 24}, wish=Scheduling(priority=-9))
    r.together(asks)
    r.together({"0 again": asks["0"], "3 goes on": Ask([*r.ids(13, 70)[:44], *r.ids(8, 8)])})
    r.beams({"beams": r.ids(13, 40)}, beam_width=4, max_tokens=4)


def ask_meanwhile(r: Recorder) -> None:
    """Prompts that come while another answer is being written."""
    story = r.text(STORY)
    others = {
        "story": Ask(story, {"prompt_logprobs": 0}),
        "ids": Ask(r.ids(20, 190), {"temperature": 1.0, "seed": 1}),
        "sampled": Ask(r.ids(21, 90), {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": None}),
    }
    first = Ask(r.text(TEXTS[0]), {"max_tokens": 24, "ignore_eos": True})
    r.stream("stream", first, lambda: r.together(others))
    r.stream("stream again", first, lambda: r.each({f"{name} again": ask for name, ask in others.items()}))


def ask_drafted(r: Recorder) -> None:
    """Answers that can be guessed in part, one at a time and several at once."""
    code, listed = r.text(CODE), "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"
    asks = {
        "code": Ask(code, {"max_tokens": 20, "draft_tokens": 4}),
        "list": Ask(listed, {"max_tokens": 20, "draft_tokens": 3}),
        "list as it pays": Ask(listed, {"max_tokens": 24, "logprobs": None}),
        "list sampled": Ask(listed, {"max_tokens": 20, "draft_tokens": 5, "temperature": 0.7, "seed": 1}),
        "penalised": Ask(listed, {"draft_tokens": 4, "presence_penalty": 0.6, "repetition_penalty": 1.1}),
        "stop": Ask(listed, {"max_tokens": 20, "draft_tokens": 6, "stop": ("3, 4", "7")}),
        "two": Ask(code, {"n": 2, "draft_tokens": 2, "temperature": 0.8, "seed": 2}),
        "held": Ask(code, {"structured": FORMS["schema"], "max_tokens": 20, "draft_tokens": 3}),
        "none": Ask(listed, {"draft_tokens": 0}),
    }
    r.each({f"{name} alone": asks[name] for name in ("list", "list sampled", "held")})
    r.together(asks)
    question = [{"role": "user", "content": "What is the capital of France, and what is it known for?"}]
    r.chat("chat", question, Ask(None, {"max_tokens": 20, "draft_tokens": 3}))


def ask_undrafted(r: Recorder) -> None:
    """Without guesses and without a prefix cache."""
    story, code = r.text(STORY), r.text(CODE)
    r.each({"story": Ask(story, {"max_tokens": 20}), "story again": Ask(story, {"max_tokens": 20, "logprobs": None})})
    r.together(
        {
            "code": Ask(code, {"max_tokens": 20}),
            "code sampled": Ask(code, {"temperature": 0.9, "seed": 1, "n": 2}),
            "held": Ask(code, {"structured": FORMS["regex"], "max_tokens": 20}),
        }
    )


def ask_adapted(r: Recorder) -> None:
    """Two adapters and the model itself, alone and in a step; one is loaded late, and forgotten."""
    text, story = r.text(TEXTS[0]), r.text(STORY)
    late = LoRARequest("late", 1, adapters_of(r.model, r.folder)["two"])
    asks = {
        "itself": Ask(story),
        "one": Ask(story, lora="one"),
        "one sampled": Ask(text, {"temperature": 0.9, "seed": 1, "n": 2}, lora="one"),
        "one held": Ask(text, {"structured": FORMS["regex"]}, lora="one"),
        "late": Ask(story, {"prompt_logprobs": 1}, lora=late),
        "late code": Ask(r.text(CODE), {"draft_tokens": 3}, lora="late"),
    }
    r.each({f"{name} alone": ask for name, ask in asks.items()})
    r.together(asks)
    r.beams({"beams": text}, lora="one", beam_width=2, max_tokens=4)
    r.chat("chat", [{"role": "user", "content": "Name a colour."}], Ask(None, lora="late"))
    r.llm.remove_lora("late")
    r.each({"itself again": Ask(story), "forgotten": Ask(story, lora="late")})


def ask_kept(r: Recorder) -> None:
    """What a second engine finds on the disk."""
    r.each({"story": Ask(r.text(STORY)), "ids": Ask(r.ids(5, 140), {"temperature": 1.0, "seed": 1})})


@dataclass(frozen=True)
class Session:
    """An engine and what it is asked.

    `pages` of 32 positions are all its memory, if given. `shows`: what shall happen.
    """

    ask: Callable[[Recorder], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    pages: int | None = None
    draft: str = ""  # "model", "head": the drafter of the model's own
    lora: bool = False
    disk: bool = False  # the sessions that have it share a folder
    only: tuple[str, ...] = ()  # models; none: all
    shows: tuple[str, ...] = ()


GUESSED = ("n_drafted", "n_accepted")
TINY = ("tiny-gemma3", "tiny-phi3")
SMALL_STEPS = {"max_step_tokens": 16, "max_seqs": 8, "max_context": 160}
SESSIONS: Mapping[str, Session] = {
    "plain": Session(ask_plainly, shows=("n_cached",)),
    "f32": Session(ask_long, {"kv_dtype": "f32"}, shows=("n_cached",)),
    "q8": Session(ask_long, {"kv_dtype": "q8"}, shows=("n_cached",)),
    "q4": Session(ask_long, {"kv_dtype": "q4"}, shows=("n_cached",)),
    "tight": Session(ask_tightly, {**SMALL_STEPS, "draft": "off"}, pages=5, shows=("n_preempted",)),
    "tight guesses": Session(
        ask_tightly,
        {**SMALL_STEPS, "draft": "ngram", "policy": "priority"},
        pages=5,
        only=TINY,
        shows=("n_preempted",),
    ),
    "fair": Session(ask_tightly, {**SMALL_STEPS, "policy": "fair", "max_seqs": 3}, only=TINY),
    "meanwhile": Session(ask_meanwhile, {"stall_ms": 1.0}),
    "small steps": Session(ask_meanwhile, {"max_step_tokens": 7, "max_seqs": 4}, only=TINY),
    "ngram": Session(ask_drafted, {"draft": "ngram"}, shows=GUESSED),
    "ngram q4": Session(ask_drafted, {"draft": "ngram", "kv_dtype": "q4"}, only=TINY, shows=GUESSED),
    "off": Session(ask_undrafted, {"draft": "off", "prefix_cache": False}),
    "adapters": Session(ask_adapted, lora=True, shows=("n_cached",)),
    "drafter": Session(ask_drafted, draft="model", shows=GUESSED),
    "head": Session(ask_drafted, draft="head", shows=GUESSED),
    "head tight": Session(ask_tightly, SMALL_STEPS, pages=5, draft="head", shows=("n_preempted",)),
    "disk cold": Session(ask_kept, disk=True, only=TINY),
    "disk warm": Session(ask_kept, disk=True, only=TINY, shows=("n_loaded",)),
}


def sessions_of(model: Model) -> Iterator[tuple[str, Session]]:
    """The engines that a model is run in."""
    for name, session in SESSIONS.items():
        missing = (session.draft == "model" and not model.drafter) or (session.draft == "head" and not model.head)
        if not missing and (not session.only or model.name in session.only):
            yield name, session


def record_model(model: Model, folder: Path, threads: int) -> Row:
    """All requests of a model: {"requests": by name, "seen": what happened how often}."""
    requests: dict[str, Row] = {}
    seen: dict[str, int] = {}
    path = path_of(model, folder)
    with tempfile.TemporaryDirectory() as disk:
        for name, session in sessions_of(model):
            start, before = time.perf_counter(), len(requests)
            context = 256 if model.tiny else 768
            options: dict[str, Any] = {"threads": threads, "offline": True, "seed": 7, "max_context": context}
            options |= {"kv_memory": 2 * context * model.kv_bytes * (2 if model.tiny else 1), **session.options}
            if options.get("kv_dtype") == "f32":
                options["kv_memory"] *= 2
            if session.pages is not None:
                options["kv_memory"] = session.pages * 32 * model.kv_bytes
            if session.draft == "model":
                options["draft"] = f"model={path_of(MODELS[model.drafter], folder)}"
            elif session.draft == "head":
                options["draft"] = f"eagle={model.head}"
                options["kv_memory"] = options["kv_memory"] * 6 // 5  # its keys and values too
            if session.lora:
                options["lora"] = {"one": adapters_of(model, folder)["one"]}
            if session.disk:
                options["kv_disk"] = disk
            with LLM(str(path), **options) as llm:
                session.ask(Recorder(model, name, llm, folder, requests, seen))
            lacking = [counter for counter in session.shows if not seen.get(f"{name} {counter}")]
            note = f"; {' and '.join(lacking)} did not happen" if lacking else ""
            took = time.perf_counter() - start
            print(f"{model.name:20} {name:14} {len(requests) - before:3} requests {took:6.1f} s{note}", flush=True)
    return {"requests": requests, "seen": seen}


def record(out: Path, models: Sequence[Model], folder: Path, threads: int) -> None:
    """Record the models, and write the file."""
    start = time.perf_counter()
    print(f"the code of {Path(martlet.__file__).parent}")
    found = {model.name: record_model(model, folder, threads) for model in models}
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"code": str(Path(martlet.__file__).parent), "models": found}
    out.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":"), sort_keys=True))
    count = sum(len(each["requests"]) for each in found.values())
    print(f"{count} requests of {len(found)} models in {time.perf_counter() - start:.0f} s: {out}")


# -- comparing -------------------------------------------------------------------------------------
def first_difference(one: Any, other: Any, place: str = "") -> str:
    """Where two values differ first, in words; "" if nowhere."""
    if type(one) is type(other) and isinstance(one, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                return f"{place} {key}: only in the {'first' if key in one else 'second'}"
            if found := first_difference(one[key], other[key], f"{place} {key}"):
                return found
        return ""
    if type(one) is type(other) and isinstance(one, list):
        for i, pair in enumerate(zip(one, other, strict=False)):
            if found := first_difference(*pair, f"{place}[{i}]"):
                return found
        return "" if len(one) == len(other) else f"{place}: {len(one)} entries, {len(other)}"
    return "" if one == other and type(one) is type(other) else f"{place}: {one!r:.200} ≠ {other!r:.200}"


def differences(one: Row, other: Row) -> str:
    """What differs in two records of a request: first the ids, since all else follows from them."""
    if "raised" in one or "raised" in other:
        return first_difference(one, other).strip()
    ids, ids_later = ([answer.pop("ids") for answer in row.get("answers", [])] for row in (one, other))
    found = first_difference(ids, ids_later, "token ids of answer") or first_difference(one, other)
    return found.strip()


def compare(one: Path, other: Path) -> int:
    """Print what differs; how many requests do, those that one file lacks included."""
    files = [json.loads(path.read_text()) for path in (one, other)]
    for path, content in zip((one, other), files, strict=True):
        print(f"{path}: the code of {content['code']}")
    names = list(dict.fromkeys([*files[0]["models"], *files[1]["models"]]))
    wrong = count = 0
    for name in names:
        if not all(name in content["models"] for content in files):
            print(f"{name}: the {'second' if name in files[0]['models'] else 'first'} file lacks this model")
            wrong += 1
            continue
        (asked, seen), (asked_later, seen_later) = (
            (content["models"][name]["requests"], content["models"][name]["seen"]) for content in files
        )
        for request in dict.fromkeys([*asked, *asked_later]):
            count += 1
            if request not in asked or request not in asked_later:
                what = f"only in the {'first' if request in asked else 'second'} file"
            else:
                what = differences(asked[request], asked_later[request])
            if what:
                wrong += 1
                print(f"{name} {request}: {what}")
        for session, counter in ((key, counter) for key, each in SESSIONS.items() for counter in each.shows):
            before, after = (found.get(f"{session} {counter}") for found in (seen, seen_later))
            if before and not after:
                print(f"note: {name} {session}: {counter} was {before} and is {after}")
    print(f"{count} requests, {wrong} differences" if wrong else f"{count} requests, all the same to the bit")
    return wrong


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="ask the models and write a file")
    recording.add_argument("out", type=Path)
    recording.add_argument("--models", nargs="+", default=list(MODELS), choices=["tiny", *MODELS], metavar="MODEL")
    recording.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "martlet-same-answers")
    recording.add_argument("--threads", type=int, default=2)
    comparing = verbs.add_parser("compare", help="compare two files")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    options = parser.parse_args()
    if options.verb == "compare":
        return 1 if compare(options.one, options.other) else 0
    wanted = [m for m in MODELS.values() if m.name in options.models or (m.tiny and "tiny" in options.models)]
    record(options.out, wanted, options.folder, options.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
