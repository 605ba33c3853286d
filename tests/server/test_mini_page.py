"""/mini as HTTP sees it: isolated, with a policy that names its scripts, and the model's file only
where it is shared.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from martlet.toy import spell
from tests.server.serving import Served, serving

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("abc")) as server:
        yield server


def test_the_page_is_isolated_and_asks_nobody(served: Served) -> None:
    first = served.http.get("/mini")
    assert (first.status_code, first.headers["location"]) == (308, "/mini/")
    page = served.http.get("/mini/")
    assert page.status_code == 200
    # What a browser wants before it lets workers share memory (HTML standard, cross-origin
    # isolation).
    assert page.headers["cross-origin-opener-policy"] == "same-origin"
    assert page.headers["cross-origin-embedder-policy"] == "require-corp"
    assert not re.findall(r'(?:src|href)="(?!data:)', page.text)
    again = served.http.get("/mini/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_policy_names_the_pages_own_script_and_style(served: Served) -> None:
    page = served.http.get("/mini/")
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in rules[rule]
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_the_models_file_comes_only_where_it_is_shared(served: Served, tmp_path: Path) -> None:
    refused = served.http.get("/mini/model.gguf")
    assert refused.status_code == 404
    assert "--share-model" in refused.text
    file = tmp_path / "tiny.gguf"
    file.write_bytes(bytes(range(100)))
    with serving(spell("abc"), share_model=True) as sharing:
        # the scripted model is no GGUF file
        assert sharing.http.get("/mini/model.gguf").status_code == 404
        object.__setattr__(sharing.service.built.config, "model", str(file))
        part = sharing.http.get("/mini/model.gguf", headers={"Range": "bytes=10-13"})
        assert (part.status_code, part.content) == (206, bytes([10, 11, 12, 13]))
        assert part.headers["content-range"] == "bytes 10-13/100"
        assert part.headers["etag"]


def test_keys_and_leaving_out() -> None:
    with serving(spell("abc"), api_keys=("the-key",), share_model=True) as keyed:
        assert keyed.http.get("/mini/").status_code == 200
        assert keyed.http.get("/mini/model.gguf").status_code == 401
    with serving(spell("abc"), web=False, share_model=True) as bare:
        assert bare.http.get("/mini/").status_code == 404
        assert bare.http.get("/mini/model.gguf").status_code == 404


def test_sources_are_within_their_size() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (WEB / "src").iterdir())
    assert lines <= 4018


@pytest.mark.skipif(
    not (WEB / "node_modules").is_dir() or shutil.which("node") is None, reason="needs node: make web-test"
)
def test_the_built_page_is_of_these_sources() -> None:
    before = (ROOT / "martlet/server/mini_page/index.html").read_bytes()
    subprocess.run(["node", "build.mjs"], cwd=WEB, check=True)
    assert (ROOT / "martlet/server/mini_page/index.html").read_bytes() == before
