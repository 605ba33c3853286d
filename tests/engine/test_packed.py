"""Packed files: the same bits from a mapping, made once, made again when damaged, never half."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from martlet import LLM, SamplingParams, toy
from martlet.cli import main
from martlet.errors import UnsupportedError
from martlet.ops.cpu.packed_file import HEADER, UNFINISHED, PackedWriter, open_packed

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)


def answer(path: Path, **options: Any) -> Any:
    with LLM(str(path), threads=1, draft="off", **options) as llm:
        [output] = llm.generate("hello", PARAMS)
        return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2moe", "gpt-oss"])
def test_a_mapped_model_gives_the_same_bits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = toy.write_model(tmp_path / "toy.gguf", family), tmp_path / "packed"
    plain = answer(path)
    assert answer(path, packed=str(folder)) == plain
    [file] = folder.iterdir()
    made = file.stat().st_mtime_ns

    def never(*args: Any) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr("martlet.ops.cpu.backend.pack_weight", never)
    assert answer(path, packed=str(folder)) == plain
    assert file.stat().st_mtime_ns == made


def test_another_model_gets_a_file_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    one, other = (toy.write_model(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    plain = answer(other)
    answer(one, packed=str(folder))
    other.replace(one)  # the same name, another content
    assert answer(one, packed=str(folder)) == plain
    assert len(list(folder.iterdir())) == 2


def damages(content: bytes) -> dict[str, bytes]:
    """Ways in which a file may be wrong."""
    _, offset, length, _ = HEADER.unpack(content[: HEADER.size])
    index = content[offset : offset + length]

    def with_index(text: bytes) -> bytes:
        return (
            HEADER.pack(b"martlet packed 1", offset, len(text), zlib.crc32(text)) + content[HEADER.size : offset] + text
        )

    return {
        "cut": content[:-1],
        "empty": b"",
        "other magic": b"x" + content[1:],
        "damaged index": content[:-2] + b"  ",
        "index beyond the end": struct.pack("<16sQQI", b"martlet packed 1", 1 << 60, 1 << 20, 0)
        + content[HEADER.size :],
        "no JSON": with_index(b"[" * 100),
        "not an object": with_index(b"[1]"),
        "a part beyond the end": with_index(index.replace(b'"q4_0", 64, ', b'"q4_0", 64, 40960000')),
        "another layout": with_index(index.replace(b'"q4_0"', b'"q4_9"')),
        "too many rows": with_index(index.replace(b'"q4_0", 64, ', b'"q4_0", 6400, ')),
        "negative": with_index(index.replace(b'"q4_0", 64, ', b'"q4_0", -64, ')),
    }


def test_a_damaged_file_is_made_again_with_a_warning(tmp_path: Path) -> None:
    path, folder = toy.write_model(tmp_path / "toy.gguf", "qwen3moe"), tmp_path / "packed"
    plain = answer(path, packed=str(folder))
    [file] = folder.iterdir()
    content = file.read_bytes()
    for name, damaged in damages(content).items():
        assert damaged != content, name
        file.write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"\.packed.* It is made again\."):
            assert answer(path, packed=str(folder)) == plain, name
        assert file.read_bytes() == content, name


def test_what_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    path = toy.write_model(tmp_path / "toy.gguf")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="packed weights are not kept"):
        assert answer(path, packed=str(tmp_path / "file" / "packed")) == answer(path)


def test_a_full_disk_ends_the_file_and_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder, puts = toy.write_model(tmp_path / "toy.gguf"), tmp_path / "packed", []
    right = PackedWriter._put

    def full(self: PackedWriter, data: Any) -> int:
        puts.append(len(data))
        if len(puts) > 3:
            raise OSError(28, "No space left on device")
        return right(self, data)

    monkeypatch.setattr(PackedWriter, "_put", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert answer(path, packed=str(folder)) == answer(path)
    assert list(folder.iterdir()) == []


def test_a_file_in_the_making_leaves_nothing(tmp_path: Path) -> None:
    """After an error in the middle, and of a process that was killed."""
    with pytest.raises(KeyboardInterrupt), open_packed(tmp_path / "x.packed"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f".dead{UNFINISHED}").write_text("")
    with open_packed(tmp_path / "x.packed") as living, open_packed(tmp_path / "y.packed"):
        assert living is not None
        assert len(list(tmp_path.iterdir())) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.packed", "y.packed"]


def test_other_backends_refuse_the_option(tmp_path: Path) -> None:
    path = toy.write_model(tmp_path / "toy.gguf")
    for options in ({"backend": "reference"}, {"oracle": True}):
        with pytest.raises(UnsupportedError, match="packed files"):
            answer(path, packed=str(tmp_path / "packed"), **options)


def test_the_command_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = tmp_path / "packed", toy.write_model(tmp_path / "toy.gguf")
    command = ["packed", "ls", "--packed", str(folder)]
    assert main(command) == 0
    assert "No packed weights" in capsys.readouterr().out
    answer(path, packed=str(folder))
    assert main(command) == 0
    assert "toy-" in capsys.readouterr().out
    for wrong in (["rm"], ["rm", "other"], ["rm", ""], ["rm", "toy", "--all"], ["ls", "toy"]):
        assert main(["packed", *wrong, "--packed", str(folder)]) == 2, wrong
        assert len(list(folder.iterdir())) == 1
    assert main(["packed", "rm", "toy", "--packed", str(folder)]) == 0
    assert list(folder.iterdir()) == []
