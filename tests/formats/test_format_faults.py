"""Hostile files: each is refused with a FormatError, in a process that may use 2 s and 200 MB more
than it began with.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from martlet.errors import FormatError
from martlet.formats.checkpoint import open_checkpoint
from martlet.formats.gguf import read_gguf
from martlet.quant.ggml import decode


def u32(x: int) -> bytes:
    return pack("<I", x)


def u64(x: int) -> bytes:
    return pack("<Q", x)


def text(s: str) -> bytes:
    return u64(len(s)) + s.encode()


def head(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + u32(3) + u64(n_tensors) + u64(n_keys)


def pair(key: str, type_number: int, raw: bytes) -> bytes:
    return text(key) + u32(type_number) + raw


def info(name: str, dims: list[int], type_number: int, offset: int) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(type_number) + u64(offset)


def pad(b: bytes, a: int = 32) -> bytes:
    return b + bytes(-len(b) % a)


def raw(header: str, data: bytes) -> bytes:
    return u64(len(header)) + header.encode() + data


def st(header: dict[str, Any], data: bytes) -> bytes:
    return raw(json.dumps(header, separators=(",", ":")), data)


def f32(shape: list[int], offsets: list[int]) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}


ARCH = pair("general.architecture", 8, text("llama"))
GGUF = {  # fault: (file, hash where the fault log states one, part of the message)
    # no room for a key at all
    "GGF-01": (head(0, 1) + u64(2**63) + b"abcd", "33ed6594e84f", "36 bytes"),
    "GGF-01 with room": (head(0, 1) + u64(2**63) + bytes(64), None, "9,223,372,036,854,775,808"),
    "GGF-03 keys": (head(0, 2**64 - 1), "3eb0a7093dca", "18,446,744,073,709,551,615"),
    "GGF-03 tensors": (head(2**60, 0), None, "1,152,921,504,606,846,976"),
    "GGF-05": (head(1, 1) + ARCH + text("t") + u32(1000000) + bytes(64), "05ba8d74e7b0", "1,000,000 dimensions"),
    "GGF-07": (pad(head(1, 1) + ARCH + info("t", [2**32, 2**32], 0, 0)) + bytes(32), "e2581ae64a7b", "'t'"),
    "GGF-09": (head(1, 1) + ARCH + info("t", [1, 0], 0, 0), "0e9054f465c7", "0"),
    "GGF-11": (
        head(1, 1) + pair("general.alignment", 4, u32(0)) + info("t", [1], 0, 0) + bytes(32),
        "6f3cbab63889",
        "general.alignment is 0",
    ),
    "GGF-13": (pad(head(1, 1) + ARCH + info("t", [8], 0, 4096)) + bytes(32), "bf53d46e891e", "'t'"),
    "GGF-19": (pad(head(1, 1) + ARCH + info("t", [8], 999, 0)) + bytes(32), "3b2250ce708a", "type 999"),
    "GGF-21": (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(16), "6365f05f7498", "big-endian GGUF is not supported"),
}
SAFETENSORS = {
    "SFT-01": (b"\xff" * 8 + b"{}", "56eedb32886b", "18,446,744,073,709,551,615"),
    "SFT-03 reversed": (st(f32([2], [8, 0]), bytes(8)), "1ca613459b97", "'t'"),
    "SFT-03 beyond": (st(f32([2], [0, 4096]), bytes(8)), None, "'t'"),
    "SFT-05": (st(f32([3], [0, 8]), bytes(8)), "056191a8abd6", "'t'"),
    "SFT-07": (
        raw(
            '{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            bytes(8),
        ),
        "573fa5dc22c2",
        "t",
    ),
    "SFT-13": (st(f32([2], [0, 8]), bytes(8))[:-4], "94e4c2be64f4", "'t'"),
}

CHILD = """
import resource, sys
from martlet.errors import FormatError
from martlet.formats.gguf import read_gguf
from martlet.formats.safetensors import read_safetensors
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)
spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + 3,) * 2)
for path in sys.argv[1:]:
    try:
        (read_gguf if path.endswith(".gguf") else read_safetensors)(path)
        print("accepted")
    except FormatError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the readers say to every file, all in one limited child process."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = []
    for files, suffix in ((GGUF, "gguf"), (SAFETENSORS, "safetensors")):
        for name, (data, _, _) in files.items():
            paths.append(folder / f"{name.replace(' ', '_')}.{suffix}")
            paths[-1].write_bytes(data)
    run = subprocess.run([sys.executable, "-c", CHILD, *map(str, paths)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(paths), run.stdout  # each message is one line
    return dict(zip([*GGUF, *SAFETENSORS], lines, strict=True))


@pytest.mark.parametrize("name", [*GGUF, *SAFETENSORS])
def test_refused_with_a_reason(name: str, answers: dict[str, str]) -> None:
    data, digest, reason = (GGUF | SAFETENSORS)[name]
    assert digest is None or hashlib.sha256(data).hexdigest().startswith(digest)
    assert answers[name] != "accepted"
    assert reason in answers[name].split(": ", 1)[1]


def test_declared_alignment_is_used(tmp_path: Path) -> None:
    """Fault GGF-17."""
    names = ("a", "b", "c" * 17)
    table = b"".join(info(name, [4], 0, 16 * i) for i, name in enumerate(names))
    data = pad(head(3, 1) + pair("general.alignment", 4, u32(16)) + table, 16)
    data += pack("<12f", *[1] * 4, *[2] * 4, *[3] * 4)
    assert hashlib.sha256(data).hexdigest().startswith("3aed025e9060")
    (tmp_path / "m.gguf").write_bytes(data)
    file = read_gguf(tmp_path / "m.gguf")
    assert [decode(file.tensors[name]).tolist() for name in names] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def split_part(number: int, count: int) -> bytes:
    keys = pair("split.no", 2, pack("<H", number)) + pair("split.count", 2, pack("<H", count))
    keys += pair("split.tensors.count", 5, pack("<i", count))
    return pad(head(1, 3) + keys + info(f"t{number}", [1], 0, 0)) + pack("<f", number)


def test_any_part_of_a_split_opens_all(tmp_path: Path) -> None:
    """Fault GGF-23."""
    paths = [tmp_path / f"x-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(split_part(i, 3))
    for path in (*paths, tmp_path):
        with open_checkpoint(path) as checkpoint:
            assert {n: float(decode(t)[0]) for n, t in checkpoint.tensors.items()} == {"t0": 0.0, "t1": 1.0, "t2": 2.0}
    paths[2].unlink()
    with pytest.raises(FormatError, match=r"x-00003-of-00003\.gguf"):
        open_checkpoint(paths[1])


@pytest.mark.parametrize(("shard", "reason"), [("a-00002.safetensors", "a-00002"), ("../x.safetensors", r"\.\./x")])
def test_index_of_shards(shard: str, reason: str, tmp_path: Path) -> None:
    """Faults SFT-09 (a shard is missing) and SFT-11 (a path out of the folder)."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(st(f32([2], [0, 8]), bytes(8)))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": shard}}))
    with pytest.raises(FormatError, match=reason):
        open_checkpoint(folder)
