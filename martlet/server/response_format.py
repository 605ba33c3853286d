"""What a request's fields hold the answer to: OpenAI's, vLLM's and llama.cpp's names for it become one `Structured`.

    response_format   text, json_object, json_schema (also llama.cpp's and vLLM's forms of it), structural_tag
    structured_outputs, guided_json/regex/choice/grammar, structural_tag      vLLM's
    json_schema, grammar                                                      llama.cpp's
    tool_choice       required, a named tool; auto: free text until a call begins, which then has the tool's form

Nothing is weakened: what cannot be held to is refused, with the field's name (docs/structured.md). Read `grammar/grammars.py` next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from martlet.errors import RequestError
from martlet.server.tools.call_formats import ReasoningFormat, ToolFormat
from martlet.structured import Structured

if TYPE_CHECKING:
    from martlet.server.protocol import ChatRequest, GenerationRequest

__all__ = ["asked_structure", "asked_tools", "check_tools", "joined", "named", "reasoned"]

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_LLAMA_CPP = {"json_schema": "json", "grammar": "grammar"}
_VLLM = {"json", "regex", "choice", "grammar", "json_object"}
_VLLM_OF_NO_EFFECT = {
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
}


def asked_structure(body: GenerationRequest, params: Mapping[str, Any]) -> tuple[Structured | None, str]:
    """What the fields say but for tools, and the name of the field; RequestError if two do."""
    found: list[tuple[str, dict[str, Any]]] = []
    if params.get("structured") is not None:
        found.append(("structured", dict(_mapping("structured", params["structured"]))))
    form = getattr(body, "response_format", None)
    if form is not None and form.get("type") != "text":
        found.append(("response_format", _from_format(form)))
    for names in (_GUIDED, _LLAMA_CPP):
        for name, kind in names.items():
            value = getattr(body, name)
            if value == "" and names is _GUIDED:  # llama.cpp's own clients send "" for none, vLLM's do not
                raise RequestError(f"{name} is empty; give a form, or leave the field out.", param=name)
            if value not in (None, ""):
                found.append((name, {kind: value}))
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _from_vllm(body.structured_outputs)))
    if body.structural_tag is not None:
        found.append(("structural_tag", _from_tag(_parsed("structural_tag", body.structural_tag))))
    if len(found) > 1:
        raise RequestError(
            f"{' and '.join(name for name, _ in found)} are given; the answer can be held to one of them.",
            param=found[1][0],
        )
    if not found:
        return None, ""
    [(name, fields)] = found
    return named(name, lambda: Structured.from_value(fields)), name


def named(param: str, work: Any) -> Any:
    """Do what may refuse, in the name of the field that asked for it."""
    try:
        return work()
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param, code=error.code) from None


def _from_format(form: dict[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind == "json_object":
        return {"json_object": True} if form.get("schema") is None else {"json": form["schema"]}
    if kind == "json_schema":
        given = form.get("json_schema", form)
        if not isinstance(given, dict) or not isinstance(given.get("schema"), dict | bool):
            raise RequestError("response_format.json_schema has no schema; give one.", param="response_format")
        return {"json": _strict(given["schema"]) if given.get("strict") else given["schema"]}
    if kind == "structural_tag":
        return _from_tag(form)
    if kind in ("regex", "grammar"):  # as some servers have it
        return {kind: form.get("pattern" if kind == "regex" else "grammar")}
    raise RequestError(
        f"response_format of type {kind!r:.60} is not supported; give text, json_object, json_schema or structural_tag.",
        param="response_format",
        code="unsupported_parameter",
    )


def _strict(schema: Any) -> Any:
    """A schema in strict mode: an object has no properties but those named, wherever it does not say otherwise.

    Below allOf nothing is added, since there each part names some of the properties only.
    """
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: value
        if name in ("enum", "const", "default", "examples", "allOf", "if", "not")
        else _strict_each(name, value)
        for name, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and not {"allOf", "patternProperties", "$ref"} & schema.keys():
        found.setdefault("additionalProperties", False)
    return found


def _strict_each(name: str, value: Any) -> Any:
    """Below `properties` and its like the names are no keywords."""
    if name in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas") and isinstance(
        value, dict
    ):
        return {key: _strict(entry) for key, entry in value.items()}
    return _strict(value)


def _from_vllm(given: Any) -> dict[str, Any]:
    fields = dict(_mapping("structured_outputs", given))
    if fields.get("structural_tag") is not None:
        return _from_tag(_parsed("structured_outputs", fields["structural_tag"]))
    for name in list(fields):
        if fields[name] in (None, False):
            del fields[name]
        elif name in _VLLM_OF_NO_EFFECT or name not in _VLLM:
            raise RequestError(f"structured_outputs.{name} is not supported.", param="structured_outputs")
    return fields


def _from_tag(form: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's structural tags: {"structures": [{"begin", "schema", "end"}], "triggers": […]}, or xgrammar's `format`."""
    inner = form.get("format")
    if isinstance(inner, dict):
        if inner.get("type") != "triggered_tags":
            raise RequestError("structural_tag.format: only triggered_tags is supported.", param="structural_tag")
        tags = [
            {
                "begin": tag.get("begin"),
                "end": tag.get("end", ""),
                "schema": (tag.get("content") or {}).get("json_schema", {}),
            }
            for tag in _list(inner.get("tags"))
        ]
        return {
            "tags": tags,
            "triggers": inner.get("triggers") or (),
            "at_least_one": bool(inner.get("at_least_one")),
            "stop_after_first": bool(inner.get("stop_after_first")),
        }
    return {"tags": _list(form.get("structures")), "triggers": form.get("triggers") or ()}


def _list(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise RequestError(
            "structural_tag: expected a list of objects with begin, schema and end.", param="structural_tag"
        )
    return [{k: v for k, v in entry.items() if k != "type"} for entry in value]


def _mapping(param: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} is {value!r:.60}; expected an object.", param=param)
    return value


def _parsed(param: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RequestError(f"{param} is no JSON.", param=param) from None
    return _mapping(param, value)


# -- tools -------------------------------------------------------------------------------------------------------------
# What stands before a call's arguments and behind them; {} is the name, as JSON writes it and as it is.
_CALLS = {
    "hermes": ('<tool_call>\n{"name": %j, "arguments": ', "}\n</tool_call>", "<tool_call>"),
    "llama": ('{"name": %j, "parameters": ', "}", None),
    "mistral": ('[TOOL_CALLS][{"name": %j, "arguments": ', "}]", "[TOOL_CALLS]"),
    "granite": ('<|tool_call|>[{"name": %j, "arguments": ', "}]", "<|tool_call|>"),
    "phi": ('functools[{"name": %j, "arguments": ', "}]", "functools["),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
}
MOST_BARE_TOOLS = 100  # whose calls nothing opens, so that each way to begin one is looked for
_SEVERAL = ("hermes",)  # formats in which one call may simply follow another


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """RequestError for what is no function with a name, and for two of one name."""
    seen: dict[str, int] = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if tool.get("type") not in (None, "function"):
            raise RequestError(
                f"{where} is of type {tool['type']!r:.60}; this server has function tools only.",
                param=where,
                code="unsupported_parameter",
            )
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where} is no function with a name.", param=where)
        if name in seen:
            raise RequestError(f"{where} has the name {name!r:.60}, as tools[{seen[name]}] has.", param=where)
        seen[name] = number


def asked_tools(body: ChatRequest, form: ToolFormat | None) -> tuple[Structured | None, bool]:
    """What the calls of an answer are held to, and whether that must be so: a tool that is required, named or strict."""
    choice = body.tool_choice
    if not isinstance(choice, dict) and choice not in (None, "none", "auto", "required"):
        raise RequestError(
            f"tool_choice is {choice!r:.60}; expected 'auto', 'none', 'required' or a named tool.", param="tool_choice"
        )
    tools = [tool["function"] for tool in body.tools or ()]
    wanted = _wanted(choice)
    if wanted is not None:
        tools = [tool for tool in tools if tool["name"] == wanted]
    must = wanted is not None or choice == "required"
    if must and not tools:
        said = (
            f"names {wanted!r:.60}, which is not among the tools" if wanted else "is 'required' and there are no tools"
        )
        raise RequestError(f"tool_choice {said}.", param="tool_choice")
    if not tools or choice == "none":
        return None, False
    written = _CALLS.get(form.name) if form is not None else None
    if written is None:
        if must:
            raise RequestError(
                "tool_choice: how this model writes calls is not one of the forms that an answer can be held to"
                f" ({', '.join(_CALLS)}); give 'auto', or start the server with --tool-parser.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return None, False
    begin, end, trigger = written
    if trigger is None and not must and len(tools) > MOST_BARE_TOOLS:
        return None, False
    tags: list[dict[str, Any]] = []
    for tool in tools:
        name, schema = tool["name"], tool.get("parameters")
        schema = {"type": "object"} if schema in (None, {}) else schema
        if isinstance(schema, dict) and tool.get("strict"):
            schema = _strict(schema)
        quoted = json.dumps(name, ensure_ascii=False)
        for form_ in (begin,) if trigger is not None or must else _llama_begins(begin):
            tags.append({"begin": form_.replace("%j", quoted).replace("%s", name), "schema": schema, "end": end})
    alone = body.parallel_tool_calls is False or wanted is not None or (form is not None and form.name not in _SEVERAL)
    fields: dict[str, Any] = {"tags": tags, "stop_after_first": alone, "at_least_one": must, "whitespace": "single"}
    if not must and trigger is not None:
        fields["triggers"] = (trigger,)
    elif not must:  # nothing opens a call: an answer that begins as one is one
        upto = [re.split(r",\s*\"parameters\"", tag["begin"])[0] for tag in tags]
        fields |= {"triggers": tuple(dict.fromkeys(upto)), "at_start": True, "stop_after_first": True}
    strict = must or any(tool.get("strict") for tool in tools)
    return named("tools", lambda: Structured.from_value(fields)), strict


def _llama_begins(begin: str) -> Iterator[str]:
    """The ways in which Llama 3 begins a call: with or without its control token, a type, spaces."""
    for text in (begin, begin.replace('{"name"', '{"type": "function", "name"')):
        for spaced in (text, text.replace('": ', '":').replace(', "', ',"')):
            yield from (spaced, f"<|python_tag|>{spaced}")


def _wanted(choice: str | dict[str, Any] | None) -> str | None:
    """The tool that is named: {"type": "function", "function": {"name": …}}, or with the name beside the type."""
    if not isinstance(choice, dict):
        return None
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"tool_choice is {choice!r:.80}; expected the name of a tool.", param="tool_choice")
    return name


def joined(structure: Structured | None, tools: Structured | None) -> Structured | None:
    """Both: a call, or else the answer's form."""
    if structure is None or tools is None or tools.at_least_one:
        return tools or structure
    if structure.json is None and not structure.json_object:
        raise RequestError(
            "tools can be given together with a JSON form of the answer only; give tool_choice 'none' or leave the form out.",
            param="tools",
        )
    return replace(
        tools,
        json=structure.json,
        json_object=structure.json_object,
        at_least_one=True,
        at_start=False,
        triggers=(),
        stop_after_first=True,
    )


def reasoned(structure: Structured, form: ReasoningFormat | None, prompt: str) -> Structured:
    """The same after the reasoning, if this model reasons and the prompt has not closed it already."""
    tail = prompt.rstrip()
    if form is None or tail.endswith(form.end) or structure.after is not None:
        return structure
    return replace(structure, after=form.end, after_begin=None if tail.endswith(form.start) else form.start)
