"""Write docs/options.md: every option with names, values, default and meaning.

python -m tools.write_options_page
"""

from __future__ import annotations

from pathlib import Path

from martlet.config import EngineConfig
from martlet.options import Option, options_of
from martlet.sampling_params import SamplingParams
from martlet.server.settings import ServerSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
_SECTIONS = (
    (
        EngineConfig,
        "Engine",
        "`LLM(model, name=value)`, and the commands that run a model. The caller's option wins over the environment\n"
        "variable, and the variable over the default. [tuning.md](tuning.md) explains the effects.",
    ),
    (
        SamplingParams,
        "Sampling",
        "`SamplingParams(name=value)`, fields of a request to the server, and options of `martlet run` and `martlet\n"
        "chat`. [sampling.md](sampling.md) has the formulas.",
    ),
    (ServerSettings, "Server", "`martlet serve`. [server.md](server.md) explains the protocol."),
)


def options_page() -> str:
    """The page's text."""
    lines = ["# Options", "", "Made by `tools/write_options_page.py` from the declarations: do not edit.", ""]
    for settings, title, text in _SECTIONS:
        lines += [f"## {title}", "", text, "", "| option | command line | values | default | meaning |"]
        lines += ["|---|---|---|---|---|", *map(_row, options_of(settings).values()), ""]
    return "\n".join(lines)


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags) if option.group else "–"
    if option.environment:
        flags += f" (or `{option.environment}`)"
    default = option.shown_default or ("no" if option.default is False else "–")
    cells = (f"`{option.name}`", flags, _values(option), default, option.help)
    return f"| {' | '.join(cell.replace('|', ',') for cell in cells)} |"


def _values(option: Option) -> str:
    """The right values in a few words; "–" where the meaning says them."""
    if option.path:
        return f"path of {option.path}"
    if option.check is not None or (option.type is str and not option.choices):
        return "–"
    return option.wanted.removeprefix("a ").replace("true or false", "yes, no")


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
