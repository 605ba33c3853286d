"""Writing GGUF: what is read back, by our reader and by the `gguf` package, is what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from martlet.errors import FormatError
from martlet.formats.checkpoint import open_checkpoint
from martlet.formats.gguf import read_gguf
from martlet.formats.gguf_write import write_gguf
from martlet.quant.table import BLOCKS, BlockType, RawTensor

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 64,
    "n.negative": -3,
    "n.large": 2**40,
    "n.float": 0.5,
    "n.bool": True,
    "n.u8": np.uint8(7),
    "n.double": np.float64(0.1),
    "tokenizer.ggml.tokens": ["a", "é", "\udcff", ""],
    "tokenizer.ggml.scores": [0.0, -1.5],
    "tokenizer.ggml.token_type": [1, -1],
    "flags": [True, False],
    "nested": [[1, 2], [3]],
    "empty": [],
}


def tensor(name: str, shape: tuple[int, ...], block_type: BlockType, seed: int = 0) -> RawTensor:
    block = BLOCKS[block_type]
    nbytes = int(np.prod(shape)) // block.size * block.nbytes
    return RawTensor(name, shape, block_type, np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


TENSORS = [
    tensor("a.weight", (3, 32), BlockType.Q4_0, 1),  # 54 bytes: padding follows
    tensor("b.weight", (2, 256), BlockType.Q4_K, 2),
    tensor("c", (5,), BlockType.F32, 3),
    tensor("d", (2, 3, 4), BlockType.F16, 4),
]


def same(tensor: RawTensor, other: RawTensor) -> bool:
    return (tensor.name, tensor.shape, tensor.type) == (other.name, other.shape, other.type) and np.array_equal(
        tensor.data, other.data
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert write_gguf(tmp_path / "m.gguf", METADATA, TENSORS) == [tmp_path / "m.gguf"]
    file = read_gguf(tmp_path / "m.gguf")
    assert (file.version, file.data_start % 64) == (3, 0)
    assert {**file.metadata, "tokenizer.ggml.tokens": list(file.metadata["tokenizer.ggml.tokens"])} == METADATA
    assert all(map(same, file.tensors.values(), TENSORS))


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    value_types = gguf.GGUFValueType
    # it does not read these
    metadata = {key: value for key, value in METADATA.items() if key != "nested"}
    write_gguf(tmp_path / "m.gguf", metadata, TENSORS)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    types = {key: reader.fields[key].types for key in metadata}
    assert types["general.alignment"] == [value_types.UINT32]
    assert (types["n.negative"], types["n.large"]) == ([value_types.INT32], [value_types.UINT64])
    assert (types["n.float"], types["n.double"]) == ([value_types.FLOAT32], [value_types.FLOAT64])
    assert (types["n.bool"], types["n.u8"]) == ([value_types.BOOL], [value_types.UINT8])
    assert types["tokenizer.ggml.token_type"] == [value_types.ARRAY, value_types.INT32]
    assert reader.fields["general.architecture"].contents() == "llama"
    for read, written in zip(reader.tensors, TENSORS, strict=True):
        assert (read.name, tuple(reversed(read.shape.tolist())), int(read.tensor_type)) == (
            written.name,
            written.shape,
            int(written.type),
        )
        assert np.array_equal(read.data.view(np.uint8).reshape(-1), written.data)


def test_a_file_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    """Values of the types that Python's types choose survive reading and writing."""
    kept = {key: value for key, value in METADATA.items() if not isinstance(value, np.generic)}
    write_gguf(tmp_path / "a.gguf", kept, TENSORS)
    file = read_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", file.metadata, list(file.tensors.values()))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_any_of_the_written_parts_opens_all(tmp_path: Path) -> None:
    """Fault GGF-23: parts 1, 2, 3 and the folder; then a part is missing, and is named."""
    paths = write_gguf(tmp_path / "x.gguf", METADATA, TENSORS, parts=3)
    assert [path.name for path in paths] == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in (*paths, tmp_path):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.metadata["general.architecture"] == "llama"
            assert all(map(same, checkpoint.tensors.values(), TENSORS))
    paths[2].unlink()
    for path in (paths[0], paths[1], tmp_path):
        with pytest.raises(FormatError, match=r"x-00003-of-00003\.gguf"):
            open_checkpoint(path)


def test_parts_of_parts(tmp_path: Path) -> None:
    """A split model is written in other parts: the old split.* keys go."""
    with open_checkpoint(write_gguf(tmp_path / "x.gguf", METADATA, TENSORS, parts=2)[0]) as checkpoint:
        write_gguf(tmp_path / "y.gguf", checkpoint.metadata, list(checkpoint.tensors.values()))
        paths = write_gguf(tmp_path / "z.gguf", checkpoint.metadata, list(checkpoint.tensors.values()), parts=4)
    assert not any(key.startswith("split.") for key in read_gguf(tmp_path / "y.gguf").metadata)
    assert [list(read_gguf(path).tensors) for path in paths] == [[t.name] for t in TENSORS]


@pytest.mark.parametrize(
    ("metadata", "tensors", "parts", "reason"),
    [
        ({"k": 2**64}, [], 1, "'k'"),
        ({"k": None}, [], 1, "'k'"),
        ({"k": [1, "a"]}, [], 1, "'k'"),
        ({"k": {}}, [], 1, "'k'"),
        ({"general.alignment": 12}, [], 1, "alignment is 12"),
        ({}, [TENSORS[0], TENSORS[0]], 1, "same name"),
        ({}, TENSORS, 5, "5 parts"),
    ],
)
def test_what_gguf_cannot_say_is_refused(
    metadata: dict[str, object], tensors: list[RawTensor], parts: int, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=reason):
        write_gguf(tmp_path / "m.gguf", metadata, tensors, parts=parts)
    assert not list(tmp_path.iterdir())
