"""What README and docs show works: the Python is executed, the commands and options are parsed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from martlet.cli import COMMANDS, parser_of, split_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs" / "picolm.md")  # another program, with tests of its own
PYTHON = [
    pytest.param(block, id=f"{page.name} {number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]
LINES = [
    pytest.param(command, id=command[:40])
    for page in PAGES
    for line in re.findall(r"^    (martlet .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for command in re.split(r"\s{2,}(?=martlet )", line)
]


def test_there_are_examples() -> None:
    assert PYTHON
    assert len(LINES) >= 5


@pytest.mark.model
@pytest.mark.parametrize("source", PYTHON)
def test_python_example_runs(
    source: str,
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The default model is found by its name where the tests' models are."""
    (tmp_path / "models").symlink_to(smollm2_path.parent)
    monkeypatch.setattr("martlet.hub.cache_dir", lambda: tmp_path)
    exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", LINES)
def test_command_line_is_understood(line: str) -> None:
    name, arguments = split_command(shlex.split(line, comments=True)[1:])
    parser_of(name).parse_intermixed_args(arguments)  # exits where it does not understand


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "LOG.md"], ids=lambda page: page.name)
def test_options_that_are_mentioned_exist(page: Path) -> None:
    """On every page but the log, which tells of options that are gone."""
    known = {option for name in COMMANDS for option in parser_of(name)._option_string_actions}
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    mentioned = {
        option
        for code in re.findall(r"`([^`\n]+)`", text)
        if not code.startswith(("bench/", "tools/"))
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", code)
    }
    assert mentioned <= known
