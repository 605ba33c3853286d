"""The command line against the recorded runs of the C: the same tokens, the same words on stderr,
and the faults put right.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import DATA, MISREAD, RUNNABLE, notes, ties_away, to_ggml

import picolm.model
from picolm import sampler
from picolm.cli import USAGE, main
from picolm.gguf import GGUF
from picolm.kvcache import HEADER
from picolm.quant import BLOCKS
from picolm.tokenizer import SPACE, Tokenizer

RUNS = notes("cli")["runs"]


@pytest.fixture
def as_the_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C's seeds and draws (fault A12) and its rounding of keys and values (fault A20), so that
    tokens can be compared.
    """
    monkeypatch.setattr(sampler, "splitmix64", lambda seed: seed or 42)
    monkeypatch.setattr(sampler, "rand_float", lambda state: np.float32(state >> 11) / np.float32(1 << 53))
    monkeypatch.setattr(picolm.model, "fp32_to_fp16", ties_away)


def run(path: Path, *args: str) -> tuple[int, bytes]:
    out = io.BytesIO()
    return main([str(path), *args], out), out.getvalue()


def printed(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> bytes:
    """What tokens print: as recorded, but nothing for control tokens, a space for every space mark,
    and NUL for NUL (fault A10).
    """
    vocabulary, out = notes("tokenizer")["q4_k"], b""
    for previous, token in zip([prompt[-1], *ids], ids, strict=False):
        if tokenizer.types[token] not in (2, 3):
            recorded = bytes.fromhex(vocabulary["decode_hex"][token][previous == vocabulary["bos"]])
            recorded = b"\0" if vocabulary["tokens"][token] == "<0x00>" else recorded
            out += recorded.replace(SPACE.encode(), b" ")
    return out


def clean(lines: list[str], n: int) -> list[str]:
    """stderr without times, without what each program says of its own memory; `-n N` means N tokens
    here, N + 1 there.
    """
    kept = [line for line in lines if not line.startswith(("Allocating", "Memory", "Weights", "Total"))]
    return [re.sub(r" in [\d.]+s.*", "", line).replace(f"up to {n + 1} ", f"up to {n} ") for line in kept]


def reordered(source: Path, target: Path) -> None:
    """A copy whose Q2_K and Q3_K tensors have their bits where the C looks for them (fault A3)."""
    g, data = GGUF(source), bytearray(source.read_bytes())
    for dims, type_, start in g.tensors.values():
        if type_ in (10, 11):
            block, begin = BLOCKS[type_], g.data_start + start
            end = begin + int(np.prod(dims)) // 256 * block.bytes
            rows = np.frombuffer(data[begin:end], np.uint8).reshape(-1, dims[0] // 256 * block.bytes)
            data[begin:end] = to_ggml(rows, block.name).tobytes()
    target.write_bytes(data)


@pytest.mark.usefixtures("as_the_c")
@pytest.mark.filterwarnings("ignore:invalid value")  # q3_k's numbers are NaN in the C
@pytest.mark.parametrize("name", [*RUNNABLE, *MISREAD])
def test_recorded_runs(
    tiny: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault A9: the C makes N + 1 tokens. Otherwise its tokens are ours, and its stderr too."""
    monkeypatch.chdir(tmp_path)
    reordered(tiny / f"{name}.gguf", tmp_path / f"{name}.gguf")
    g = GGUF(f"{name}.gguf")
    tokenizer = Tokenizer(g.meta, 416)
    for recorded in (r for r in RUNS[:80] if r["model"] == f"{name}.gguf" and "--json" not in r["args"]):
        args, c = list(recorded["args"]), recorded["both"]
        n = int(args[args.index("-n") + 1])
        args[args.index("-n") + 1] = str(n + 1)
        status, out = run(Path(f"{name}.gguf"), *args, "--order", "sse")
        if name == "q3_k":  # in the C the first token for ever, or the last one
            assert (status, set(c["generated_ids"]) <= {0, 415}) == (1, True)
            assert "not numbers" in capsys.readouterr().err
            continue
        assert status == c["rc"] == 0
        assert tokenizer.encode(args[1].encode()) == recorded["prompt_ids"]
        assert out == printed(tokenizer, recorded["prompt_ids"], c["generated_ids"]) + b"\n", args
        assert clean(capsys.readouterr().err.splitlines(), n) == clean(c["stderr"], n)


DAMAGE = {  # to a cache file, by the step of the recording
    "bad magic": lambda data: b"XXXX" + data[4:],
    "wrong layer count": lambda data: data[:8] + b"\x07\0\0\0" + data[12:],
    "truncated": lambda data: data[: len(data) // 2],
    "header only": lambda data: data[:HEADER],
    "empty file": lambda data: b"",
    "negative position count": lambda data: data[:4] + b"\xfb\xff\xff\xff" + data[8:],
    "zero positions": lambda data: data[:4] + bytes(4) + data[8:],
    "trailing garbage": lambda data: data + b"garbage",
    "only one position in the file": lambda data: data[:4] + b"\x01\0\0\0" + data[8:],
}
OTHER_RUNS = {  # what the other runs should end with, where it is not what the C does; by arguments
    "-n 0": (0, b"\n"),  # fault A9: a token
    "-n -2": (1, b""),  # fault A14: a prefill cut short
    "-n abc": (1, b""),
    "-j 0": (1, b""),
    "a b c d e f g h": (1, b""),  # fault A13: an empty answer
    "-c 100000": (1, b""),
    "-c -5": (1, b""),
}


@pytest.mark.usefixtures("as_the_c")
@pytest.mark.parametrize("recorded", RUNS[80:], ids=lambda r: f"{r['model'][:8]} {' '.join(r['args'][:4])}")
def test_other_runs(tiny: Path, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> None:
    """stdin, odd values, contexts; and fault A4: models of types that the C stops on."""
    args, c, typed = recorded["args"], recorded["both"], base64.b64decode(recorded.get("stdin_b64", ""))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    n = int(args[args.index("-n") + 1]) if "-n" in args and args[-1] != "-n" and "abc" not in args else 0
    more = [
        str(n + 1) if n > 0 and a == str(n) and before == "-n" else a
        for before, a in zip(["", *args], args, strict=False)
    ]
    status, out = run(tiny / recorded["model"], *more, "--order", "sse") if args != ["--help"] else run(tiny, "--help")
    expected = next((end for words, end in OTHER_RUNS.items() if words in " ".join(args)), None)
    if expected is not None:
        assert (status, out) == expected
    elif recorded["model"].startswith("bad_"):
        assert (status, c["rc"]) == (0, 1)
        assert len(out) > 1
    elif args == ["--help"]:
        assert (status, capsysbinary.readouterr().out.decode().strip()) == (0, USAGE.strip())
    elif c["rc"] == 0 and b"\0" not in typed:
        # fault A10
        right = bytes.fromhex(c["stdout_hex"]).replace(b"</s>", b"").replace(SPACE.encode(), b" ")
        assert (status, out) == (0, right)
    else:  # the C reads a prompt up to a NUL; nothing else ends a prompt here
        assert status == c["rc"]


@pytest.mark.parametrize("name", MISREAD)
def test_models_that_the_c_misreads(tiny: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault A3: q3_k prints `<unk>` for ever there."""
    status, out = run(tiny / f"{name}.gguf", "-p", "hello the cat", "-n", "24", "-t", "0")
    assert status == 0
    assert b"<unk>" not in out
    assert "Generation: 24 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["f32", "q8_0", "q2_k", "q6_k", "tied_q4_0"])
@pytest.mark.parametrize("seed", [1, 2])
def test_json_mode_is_always_json(tiny: Path, name: str, seed: int) -> None:
    """Fault A11: 21 of 28 texts at which the C stopped were no JSON, and 92 more ended unclosed.
    Random models are the hardest case.
    """
    for n in (2, 5, 24):
        status, out = run(
            tiny / f"{name}.gguf",
            "-p",
            "return json",
            "-n",
            str(n),
            "-t",
            "1.0",
            "-k",
            "1.0",
            "-s",
            str(seed),
            "--json",
        )
        assert status == 0
        assert isinstance(json.loads(out), dict | list)


@pytest.mark.parametrize("recorded", [r for r in RUNS[:80] if "--json" in r["args"]], ids=lambda r: r["model"][:8])
def test_recorded_json_runs(tiny: Path, recorded: dict[str, Any]) -> None:
    """Fault A11, with the settings of the C's own runs."""
    status, out = run(tiny / recorded["model"], *recorded["args"])
    assert status == 0
    assert isinstance(json.loads(out), dict | list)


def test_json_mode_needs_room(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run(tiny / "f32.gguf", "-p", "return json", "-n", "1", "-t", "0", "--json")
    assert one in ((0, b"{}\n"), (0, b"[]\n"))  # this vocabulary has tokens that are a whole value


def test_number_of_tokens(tiny: Path) -> None:
    """Fault A9: none asked for, none made."""
    assert run(tiny / "f32.gguf", "-p", "hello", "-n", "0", "-t", "0") == (0, b"\n")


def test_prompt_and_context(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault A13: a prompt that is too long is an error, and a full context is told."""
    assert run(tiny / "f32.gguf", "-p", "hello the cat", "-c", "4")[0] == 1
    assert "a prompt of 5 tokens: the context has room for 1 to 4" in capsys.readouterr().err
    assert run(tiny / "f32.gguf", "-p", "hello the cat", "-c", "8", "-n", "9", "-t", "0")[0] == 0
    err = capsys.readouterr().err
    assert "Generation: 4 tokens" in err
    assert "The context of 8 is full" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "No model given"),
        (["m", "--what"], "Unknown option: --what"),
        (["m", "-n"], "-n needs a value"),
        (["m", "-n", "-3"], "-n is '-3'"),  # fault A14
        (["m", "-n", "ten"], "-n is 'ten'"),
        (["m", "-t", "nan"], "-t is 'nan'"),
        (["m", "-t", "-1"], "-t is '-1'"),
        (["m", "-k", "1.5"], "-k is '1.5'"),
        (["m", "-j", "0"], "-j is '0'"),
        (["m", "-c", "0"], "-c is '0'"),
        (["m", "-s", "18446744073709551616"], "-s is"),
        (["m", "--order", "best"], "--order best"),
        (["m", "-p", ""], "No prompt provided"),
        (["m", "--cache", ""], "--cache needs the name of a file"),
        (["m", "--json", "-n", "0"], "no room for JSON"),
    ],
)
def test_command_line_is_checked(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args, io.BytesIO()) == 1
    err = capsys.readouterr().err
    assert message in err
    assert USAGE in err
    for option in re.findall(r"^  (-\S+)", notes("cli")["usage_stderr"], re.M):
        assert f"\n  {option} " in USAGE  # every option of the C's


def test_prompt_from_stdin_and_split_of_streams(tiny: Path) -> None:
    """In a process of its own: text on stdout, all else on stderr, the final newline of stdin
    kept.
    """
    command = [sys.executable, "-m", "picolm", str(tiny / "q8_0.gguf"), "-n", "5", "-t", "0", "--order", "sse"]
    environment = {**os.environ, "PYTHONPATH": str(Path(picolm.model.__file__).parents[1])}
    piped = subprocess.run(command, input=b"hello the cat\n", capture_output=True, env=environment, check=True)
    given = subprocess.run([*command, "-p", "hello the cat\n"], capture_output=True, env=environment, check=True)
    assert piped.stdout == given.stdout
    assert b"Prompt: 6 tokens" in piped.stderr
    assert b"Loading" not in piped.stdout


def test_help(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], ["-h"], ["m", "-n", "3", "--help"]):
        assert main(args) == 0
        assert capsys.readouterr().out.strip() == USAGE.strip()
    assert run(tiny / "f32.gguf", "-n", "1", "-p", "--help")[1] != b""  # a prompt


class TestCache:
    """Faults A1 and A2, and what the C accepts in a cache file."""

    PROMPT = "hello the cat sat on"

    def without(self, tiny: Path, prompt: str = PROMPT) -> bytes:
        return run(tiny / "q4_k.gguf", "-p", prompt, "-n", "8", "-t", "0", "--order", "sse")[1]

    def cached(
        self, tiny: Path, path: Path, prompt: str = PROMPT, model: str = "q4_k", order: str = "sse"
    ) -> tuple[int, bytes]:
        return run(tiny / f"{model}.gguf", "-p", prompt, "-n", "8", "-t", "0", "--order", order, "--cache", str(path))

    @pytest.mark.usefixtures("as_the_c")
    @pytest.mark.parametrize("name", ["q4_k", "f16"])
    def test_bytes_of_keys_and_values(self, tiny: Path, tmp_path: Path, name: str) -> None:
        """A file holds the C's keys and values behind our own header and the tokens."""
        _, out = self.cached(tiny, tmp_path / "cache", model=name, order="scalar")
        c = (DATA / f"kvcache/{name}_a.kvc").read_bytes()
        assert (tmp_path / "cache").read_bytes()[HEADER + 4 * 9 : -32] == c[16:]
        recorded = next(r for r in notes("kvcache") if r["model"] == f"{name}.gguf" and r["step"] == "save")
        # the C made a token more
        assert out[:-1] == bytes.fromhex(recorded["stdout_hex"])[: len(out) - 1]

    @pytest.mark.usefixtures("as_the_c")
    @pytest.mark.parametrize("name", ["q4_k", "f16"])
    def test_recorded_steps(self, tiny: Path, tmp_path: Path, name: str) -> None:
        """Faults A1, A2 and B: 34 runs one after the other, their file damaged as the C's was. What
        the C prints without a cache is right.
        """
        path = tmp_path / "cache"
        for recorded in (r for r in notes("kvcache") if r["model"] == f"{name}.gguf"):
            step, before = recorded["step"], path.read_bytes() if path.exists() else b""
            if step in DAMAGE:
                path.write_bytes(DAMAGE[step](before))
            args = ["-p", recorded["prompt"], "-n", str(recorded["n"] + 1), "-t", recorded["t"], "--cache", str(path)]
            status, out = run(tiny / f"{name}.gguf", *args, *recorded["extra_args"], "--order", "sse")
            if step in ("bad magic", "context shorter than the cache"):  # no cache file; fault A13
                assert (status, out) == (1, b""), step
                path.write_bytes(before)
                continue
            # fault A10
            right = re.sub(b"</?s>|<unk>", b"", bytes.fromhex(recorded["stdout_without_cache_hex"]))
            assert (status, out) == (0, right.replace(SPACE.encode(), b" ")), step

    def test_hits_change_nothing(self, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Fault A1, all recorded steps: saved, same prompt, longer, other prompt (fault A2), again,
        shorter.
        """
        path = tmp_path / "cache"
        other = "the dog ran to the park and the zoo"
        steps = [
            (self.PROMPT, 0),
            (self.PROMPT, 8),
            (self.PROMPT + " the mat", 9),
            (other, 1),
            (other, None),
            ("hello", 1),
            (self.PROMPT, 2),
        ]
        for prompt, skipped in steps:
            assert self.cached(tiny, path, prompt) == (0, self.without(tiny, prompt)), prompt
            found = re.search(r"Skipping (\d+) cached", capsys.readouterr().err)
            if skipped is not None:
                assert int(found[1] if found else 0) == skipped

    @pytest.mark.parametrize("damage", ["cut", "header", "trailing", "bit", "count", "empty"])
    def test_damaged_files_count_as_empty(
        self, tiny: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "cache"
        self.cached(tiny, path)
        whole = path.read_bytes()
        flipped = bytes([*whole[:200], whole[200] ^ 1, *whole[201:]])
        # fault B: negative in the C, and accepted
        count = whole[:4] + (0x80000001).to_bytes(4, "little") + whole[8:]
        broken = {
            "cut": whole[:-40],
            "header": whole[:48],
            "trailing": whole + b"x",
            "bit": flipped,
            "count": count,
            "empty": b"",
        }[damage]
        path.write_bytes(broken)
        capsys.readouterr()
        assert self.cached(tiny, path) == (0, self.without(tiny))
        assert "damaged: not used" in capsys.readouterr().err
        assert path.read_bytes() == whole

    def test_another_model_and_the_cs_file(
        self, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Fault A2: q8_0 and q6_k have the same layers and widths, and the C mistakes one for the
        other.
        """
        path = tmp_path / "cache"
        self.cached(tiny, path, model="q8_0")
        assert self.cached(tiny, path, model="q6_k")[0] == 0
        assert "of another model" in capsys.readouterr().err
        path.write_bytes((DATA / "kvcache/q4_k_poisoned.kvc").read_bytes())
        assert self.cached(tiny, path) == (0, self.without(tiny))
        assert "a file of the C program" in capsys.readouterr().err

    def test_no_file_of_another_kind_is_overwritten(
        self, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("mine")
        assert self.cached(tiny, path)[0] == 1
        assert "is not overwritten" in capsys.readouterr().err
        assert path.read_text() == "mine"

    def test_write_errors_are_seen(self, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Fault B: "KV cache saved" to a full disk, and status 0 for a path that cannot be
        written.
        """
        status, out = self.cached(tiny, tmp_path / "missing/cache")
        assert (status, out) == (1, self.without(tiny))  # the text is there all the same
        assert "cannot write the cache" in capsys.readouterr().err


def test_streamed_and_held_weights(tiny: Path) -> None:
    """Weights from the file in bands give the text that weights held as numbers give."""
    texts: list[Any] = [
        run(tiny / "mix_q4km.gguf", "-p", "once upon a time", "-n", "20", "-t", "0", "-m", m) for m in ("0", "100")
    ]
    assert texts[0] == texts[1]
