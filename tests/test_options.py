"""Options: wrong values are refused by name, right ones count; command line and page agree."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from martlet.cli import main
from martlet.commands.arguments import add_engine_options, add_sampling_options, engine_options, sampling_options
from martlet.config import EngineConfig, Origin, resolve_config
from martlet.errors import RequestError
from martlet.llm import LLMOptions
from martlet.options import Option, options_of
from martlet.sampling_params import SamplingParams
from martlet.server.settings import ServerSettings
from tools.write_options_page import PAGE, options_page

# Option → a value that counts, and values that do not.
OPTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "threads": (3, (0, -1, 1.5, "2", True, 1 << 20)),
    "max_context": (64, (0, -1, 1.5, "64", True)),
    "kv_dtype": ("f32", ("f15", 16)),
    "kv_memory": (1 << 20, (0, -1, 1.5, "1G")),
    "kv_disk": ("folder", ("", 5)),
    "packed": ("folder", ("", 5)),
    "backend": ("null", ("cpus", 5)),
    "max_step_tokens": (64, (0, -1, 1.5, 1 << 40)),
    "max_seqs": (2, (0, -1, 1.5, 1 << 40)),
    "draft": ("off", ("of", "model=", "model", 5)),
    "policy": ("fair", ("lifo", 5)),
    "stall_ms": (20.5, (0, -1.0, "20", True, float("nan"), float("inf"))),
    "string_limit": (900, (-1, 1.5, "20", True)),
    "item_limit": (0, (-1, 1.5, "20", True)),
    "max_waiting": (10, (0, -1, 1.5, "10")),
    "max_waiting_tokens": (1000, (0, -1, 1.5, "10")),
    "seed": (5, (1.5, "5", 1 << 64, True)),
    "lora": ({"sql": "folder"}, ("sql", {"": "x"}, {"a": ""}, {5: "x"})),
    "offline": (True, (1, "yes")),
    "oracle": (True, (1, "yes")),
    "prefix_cache": (False, (0, "no")),
    "exact_turns": (False, (0, "no")),
    "chat_template": ("{{ messages }}", ("", 5)),
    "tokenizer_pre": ("llama-bpe", ("", 5)),
    "trace": ("file", ("", 5)),
    "capsule": ("file", ("", 5)),
}
WITH_ANOTHER: dict[str, tuple[dict[str, Any], Any, tuple[Any, ...]]] = {
    "kv_disk_size": ({"kv_disk": "folder"}, 1 << 30, (0, 1.5, "4G")),
}


def test_the_options_of_llm_are_the_fields_of_the_settings() -> None:
    """For type checkers, `LLMOptions` repeats names and types; this keeps it true."""
    assert OPTIONS.keys() | WITH_ANOTHER.keys() == LLMOptions.__annotations__.keys()
    hints, settings = get_type_hints(LLMOptions), get_type_hints(EngineConfig)
    settable = options_of(EngineConfig).keys() - {"model", "page_size"}
    assert hints == {name: settings[name] | None for name in settable}


def test_the_page_of_options_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == options_page(), "run python -m tools.write_options_page"


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams, ServerSettings])
def test_every_option_says_what_it_is(settings: type) -> None:
    """In one line of help, and in the error for a value of a wrong type."""
    for name, option in options_of(settings).items():
        assert option.help
        assert option.help[0] != option.help[0].upper() or not option.help[0].isalpha()
        assert not option.help.endswith(".")
        with pytest.raises(RequestError) as refused:
            option.checked(object())
        assert refused.value.param == name


@pytest.mark.parametrize(
    ("record", "value", "message"),
    [
        ({"type": int, "low": 1, "high": 1024}, 0, "x is 0; expected a whole number from 1 to 1,024."),
        ({"type": int, "low": 0}, 1.5, "x is 1.5; expected a whole number, 0 or more."),
        (
            {"type": int, "low": 1, "high": 1 << 62, "unit": "bytes"},
            "1G",
            "expected a whole number of bytes from 1 to 2^62.",
        ),
        ({"type": int, "low": -(1 << 63), "high": (1 << 64) - 1}, 1 << 64, "a whole number from -2^63 to 2^64 - 1."),
        ({"type": float, "low": 0, "high": 1}, 2, "x is 2; expected a number from 0 to 1."),
        ({"type": float, "above": 0, "high": 1e9, "unit": "ms"}, 0, "a number of ms above 0 and up to 1,000,000,000."),
        ({"type": bool}, 1, "x is 1; expected true or false."),
        ({"choices": ("cpu", "null")}, "cpus", "x is 'cpus'; expected one of cpu, null. Did you mean 'cpu'?"),
        ({"path": "a folder"}, "a\0b", "x is 'a\\x00b'; expected the path of a folder."),
        ({}, "", "x is ''; expected a text that is not empty."),
    ],
)
def test_errors_name_value_and_expectation(record: dict[str, Any], value: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        Option(help="", name="x", **record).checked(value)
    assert message in str(refused.value)
    assert refused.value.param == "x"


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"default": 16}, "16"),
        ({"default": 65536}, "65,536"),
        ({"default": 16 << 20, "unit": "bytes"}, "16M"),
        ({"default": 1500, "unit": "bytes"}, "1500"),
        ({"default": 0.1}, "0.1"),
        ({"default": True}, "yes"),
        ({"default": None}, ""),
        ({"default": None, "default_help": "no limit"}, "no limit"),
        ({"default": ("\n", ":")}, "'\\n' ':'"),
    ],
)
def test_defaults_are_shown(record: dict[str, Any], shown: str) -> None:
    assert Option(help="", name="x", **record).shown_default == shown


def test_an_unknown_option_of_a_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "m", "--thread", "3"])
    assert "there is no option --thread. Did you mean '--threads'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "beside", "good", "wrong"),
    [(name, {}, *values) for name, values in OPTIONS.items()] + [(name, *v) for name, v in WITH_ANOTHER.items()],
)
def test_an_option_counts_or_is_refused(name: str, beside: dict[str, Any], good: Any, wrong: tuple[Any, ...]) -> None:
    config = resolve_config({"model": "m", **beside, name: good}, environ={})
    [setting] = [setting for setting in config.settings() if setting.name == name]
    assert (setting.value, setting.origin) == (good, Origin.OPTION)
    assert resolve_config({"model": "m", **beside}, environ={}).settings() != config.settings()
    for value in wrong:
        with pytest.raises(RequestError) as refused:
            resolve_config({"model": "m", **beside, name: value}, environ={})
        assert refused.value.param == name, value


def test_what_the_command_line_takes_reaches_the_engine(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{{ messages }}")
    given = {
        "--threads": ("3", "threads", 3),
        "--context": ("64", "max_context", 64),
        "--kv-dtype": ("f32", "kv_dtype", "f32"),
        "--kv-memory": ("512M", "kv_memory", 512 << 20),
        "--max-seqs": ("5", "max_seqs", 5),
        "--max-step-tokens": ("99", "max_step_tokens", 99),
        "--kv-disk": ("folder", "kv_disk", "folder"),
        "--packed": ("folder", "packed", "folder"),
        "--kv-disk-size": ("2G", "kv_disk_size", 2 << 30),
        "--draft": ("off", "draft", "off"),
        "--policy": ("deadline", "policy", "deadline"),
        "--stall-ms": ("12.5", "stall_ms", 12.5),
        "--string-limit": ("900", "string_limit", 900),
        "--item-limit": ("12", "item_limit", 12),
        "--max-waiting": ("7", "max_waiting", 7),
        "--max-waiting-tokens": ("900", "max_waiting_tokens", 900),
        "--backend": ("null", "backend", "null"),
        "--tokenizer-pre": ("llama-bpe", "tokenizer_pre", "llama-bpe"),
        "--chat-template": (str(template), "chat_template", "{{ messages }}"),
        "--no-prefix-cache": (None, "prefix_cache", False),
        "--offline": (None, "offline", True),
        "--oracle": (None, "oracle", True),
    }
    parser = ArgumentParser()
    add_engine_options(parser)
    assert engine_options(parser.parse_args([])) == {}
    for option, (text, name, value) in given.items():
        words = [option] if text is None else [option, text]
        assert engine_options(parser.parse_args(words)) == {name: value}, option
    options = {option for action in parser._actions[1:] for option in action.option_strings}
    assert not [action.dest for action in parser._actions[1:] if not given.keys() & set(action.option_strings)]
    assert given.keys() <= options


def test_every_sampling_parameter_has_an_option_that_sets_it() -> None:
    parser = ArgumentParser()
    add_sampling_options(parser, max_tokens="")
    texts = {"bool": "", "int": "1", "float": "0.5", "tuple[int": "7", "tuple[str": "top_k", "Mapping": "5=1.0"}
    for field in fields(SamplingParams):
        # of no use where one answer is shown as text
        if field.name in ("n", "best_of", "detokenize", "structured"):
            continue
        text = (
            next(text for kind, text in reversed(texts.items()) if kind in str(field.type))
            if ("Literal" not in str(field.type))
            else "processed"
        )
        text = {"dry_base": "1.5", "mirostat": "2"}.get(field.name, text)
        option = "--" + field.name.replace("_", "-")
        negated = field.default is True
        words = [option.replace("--", "--no-", 1)] if negated else [option, text] if text else [option]
        found = sampling_options(parser.parse_args(words))
        assert found.keys() == {field.name}
        assert found[field.name] != field.default
