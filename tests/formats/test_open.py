"""Opening files: paths that are no files, limits, names, JSON; what a fingerprint tells apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.formats.gguf import read_gguf
from martlet.formats.gguf_write import write_gguf
from martlet.formats.safetensors import read_safetensors
from martlet.quant.ggml import decode
from martlet.quant.table import BlockType, RawTensor
from tests.formats.test_format_faults import ARCH, f32, head, info, pad, pair, raw, st, text, u32, u64


@pytest.mark.parametrize("read", [read_gguf, read_safetensors, open_checkpoint])
def test_what_is_no_file(read: object, tmp_path: Path) -> None:
    assert callable(read)
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "empty.gguf").touch()
    cases = {"missing": "No such file", "pipe": "is a pipe", "empty": "has 0 bytes", "\0": "null"}
    for name, reason in cases.items():
        with pytest.raises(FormatError, match=reason):
            read(tmp_path / f"{name}.gguf")
    with pytest.raises(FormatError, match=r"is a folder|not a model's folder"):
        read(tmp_path / "folder.gguf")


def test_limits_of_counts(tmp_path: Path) -> None:
    """A file as large as the counts claim is refused before its entries are read."""
    path = tmp_path / "m.gguf"
    for data, reason in (
        (head(0, 65_537) + bytes(65_537 * 14), "65,537 key-value pairs; at most 65,536"),
        (head(131_073, 0) + bytes(131_073 * 33), "131,073 tensors; at most 131,072"),
        (head(0, 1) + pair("k", 9, u32(0) + u64(1 << 24 | 1)) + bytes(1 << 24 | 1), "'k' brings .* 16,777,217"),
        (head(0, 1) + text("k" * 65_536) + bytes(99), "65,536 bytes; expected 1 to 65,535"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=reason):
            read_gguf(path)


def test_names_are_utf8(tmp_path: Path) -> None:
    """The offset is that of the bad byte. Strings of values keep theirs."""
    path = tmp_path / "m.gguf"
    path.write_bytes(head(0, 1) + u64(3) + b"ab\xff" + u32(0) + bytes(32))
    with pytest.raises(FormatError, match=r"key 0 is not UTF-8: b'ab\\xff'") as caught:
        read_gguf(path)
    assert caught.value.offset == 24 + 8 + 2
    table = u64(2) + b"\xc3(" + info("", [1], 0, 0)[8:]
    path.write_bytes(pad(head(1, 1) + ARCH + table) + bytes(32))
    with pytest.raises(FormatError, match="the name of tensor 0 is not UTF-8") as caught:
        read_gguf(path)
    assert caught.value.offset == 24 + len(ARCH) + 8
    tokens = u32(8) + u64(2) + u64(1) + b"\xff" + u64(1) + b"a"
    path.write_bytes(head(0, 2) + pair("tokens", 9, tokens) + pair("one", 8, u64(1) + b"\xfe"))
    metadata = read_gguf(path).metadata
    assert (list(metadata["tokens"]), metadata["one"]) == (["\udcff", "a"], "\udcfe")


@pytest.mark.parametrize(("number", "name"), [(34, "TQ1_0"), (35, "TQ2_0"), (40, "NVFP4"), (31, "Q4_0_4_4")])
def test_types_that_are_not_read_are_named(number: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(pad(head(1, 0) + info("t", [256], number, 0)) + bytes(512))
    with pytest.raises(UnsupportedError, match=rf"m\.gguf: tensor 't' has the type {name}\. Supported: F32, "):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("header", ['{"t":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}', "[]", "{", "[" * 9999])
def test_headers_that_are_none(header: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(raw(header, bytes(4)))
    with pytest.raises(FormatError):
        read_safetensors(tmp_path / "m.safetensors")


def test_a_shape_of_many_dimensions(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(st(f32([1] * 9, [0, 4]), bytes(4)))
    with pytest.raises(FormatError, match="the shape is"):
        read_safetensors(tmp_path / "m.safetensors")


def test_a_single_number(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(st(f32([], [0, 4]), np.float32(1.5).tobytes()))
    tensor = read_safetensors(tmp_path / "m.safetensors")[0]["t"]
    assert (tensor.shape, decode(tensor).tolist()) == ((), 1.5)


def folder(path: Path, config: str = "{}") -> Path:
    """A Hugging Face folder with one shard of two tensors, t and u."""
    path.mkdir()
    header = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate("tu")}
    (path / "a.safetensors").write_bytes(st(header, np.float32([1, 2]).tobytes()))
    (path / "config.json").write_text(config)
    return path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_a_key_twice_in_json(name: str, tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    (model / name).write_text('{"a": {"b": 1, "b": 2}}')
    with pytest.raises(FormatError, match=rf"{name}: the file has 'b' twice"):
        open_checkpoint(model)


def test_tensors_that_the_index_omits_are_seen(tmp_path: Path) -> None:
    """Loading refuses those that it has no use for; what an index omits must not escape it."""
    model = folder(tmp_path / "model")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": "a.safetensors"}}))
    with open_checkpoint(model) as checkpoint:
        assert {name: decode(t).tolist() for name, t in checkpoint.tensors.items()} == {"t": [1.0], "u": [2.0]}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"v": "a.safetensors"}}))
    with pytest.raises(FormatError, match="does not hold 'v', which the index promises"):
        open_checkpoint(model)


def test_pipes_in_a_folder(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "b.safetensors"):
        model = folder(tmp_path / f"model-{name}")
        os.mkfifo(model / name)
        with pytest.raises(FormatError, match=rf"{name}: is a pipe"):
            open_checkpoint(model)


def test_fingerprints(tmp_path: Path) -> None:
    """Another weight, another key or another config make another model; a copy is the same one."""

    def gguf(name: str, value: float, rope: float) -> str:
        data = np.full(64, value, np.float32).view(np.uint8)
        write_gguf(tmp_path / name, {"rope": rope}, [RawTensor("t", (64,), BlockType.F32, data)])
        with open_checkpoint(tmp_path / name) as checkpoint:
            return checkpoint.fingerprint()

    def hf(name: str, config: str) -> str:
        with open_checkpoint(folder(tmp_path / name, config)) as checkpoint:
            return checkpoint.fingerprint()

    first = gguf("a.gguf", 1, 1)
    assert gguf("b.gguf", 1, 1) == first
    assert len({first, gguf("c.gguf", 2, 1), gguf("d.gguf", 1, 2), hf("e", '{"x": 1}'), hf("f", '{"x": 2}')}) == 5
    assert hf("g", '{"x": 1}') == hf("h", '{ "x": 1 }')
