"""Typed access to an untrusted file's metadata (read `metadata.py` next).

Each value is checked where it is read: of another type or out of range it is a FormatError that
names its key.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import Checkpoint

# Keys of a GGUF architecture that change nothing here: they repeat the tensors, or serve training.
HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"})


class Keys:
    """Typed access to a mapping from an untrusted file."""

    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path, self._values, self._prefix = checkpoint.path, values, prefix
        self._read: set[str] = set()

    def get(self, key: str, types: tuple[type, ...], default: Any = None) -> Any:
        self._read.add(key)
        value = self._values.get(self._prefix + key)
        if value is None:
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(type_.__name__ for type_ in types)
            raise FormatError(self._path, f"{self._prefix}{key} is {str(value)[:60]!r}, expected {wanted}")
        return value

    def fail(self, message: str) -> NoReturn:
        """Raise FormatError for the file."""
        raise FormatError(self._path, message)

    def size(self, key: str, default: int | None = None) -> int:
        """A count of at least 1; a list whose entries are equal counts as its entry.

        Raises FormatError, and UnsupportedError for entries that differ.
        """
        value = self.get(key, (int, list), default)
        if isinstance(value, list):
            if len(set(map(str, value))) != 1:
                raise UnsupportedError(f"{self._prefix}{key} differs from layer to layer: {str(value)[:60]}")
            value = value[0]
        if value is None:
            raise FormatError(self._path, f"{self._prefix}{key} is missing: the file does not describe its model")
        if not isinstance(value, int) or not 1 <= value <= 1 << 24:
            raise FormatError(self._path, f"{self._prefix}{key} is {value!r}, expected a count of 1 or more")
        return value

    def count(self, key: str) -> int:
        """A count, 0 if it is missing. Raises FormatError."""
        value: int = self.get(key, (int,), 0)
        if not 0 <= value <= 1 << 24:
            raise FormatError(self._path, f"{self._prefix}{key} is {value!r}, expected a count")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key, (int, float), default)
        if value is not None and not abs(value) < 1e30:
            raise FormatError(self._path, f"{self._prefix}{key} is {value!r}, expected a finite number")
        return None if value is None else float(value)

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value is None or value <= 0:
            raise FormatError(self._path, f"{self._prefix}{key} is {value!r}, expected a number above 0")
        return value

    def refuse_unread(self) -> None:
        """Raise UnsupportedError for an unread key with the prefix: it could change the result."""
        for name, value in self._values.items():
            key = name.removeprefix(self._prefix)
            if name.startswith(self._prefix) and key not in self._read and key not in HARMLESS:
                raise UnsupportedError(f"{self._path}: {name} = {str(value)[:60]}")
