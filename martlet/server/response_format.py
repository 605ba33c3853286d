"""The format that a request demands of its answer, from OpenAI's, vLLM's and llama.cpp's fields.

    response_format   text, json_object, json_schema (also in llama.cpp's and vLLM's forms),
    structural_tag structured_outputs, guided_json/regex/choice/grammar, structural_tag      vLLM
    json_schema, grammar                                                      llama.cpp tool_choice
    required, a named tool; auto: free text until a call begins

All become one `Structured`. Nothing is weakened: a format that cannot be enforced is refused with
the field's name (docs/structured.md). Read `grammar/grammars.py` next. Sources:
https://platform.openai.com/docs/guides/structured-outputs,
https://docs.vllm.ai/en/latest/features/structured_outputs.html
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
    """The answer's format without tools, and the name of its field.

    Raises RequestError if two fields give a format, or if a format is wrong.
    """
    given: list[tuple[str, dict[str, Any]]] = []
    if params.get("structured") is not None:
        given.append(("structured", dict(_mapping("structured", params["structured"]))))
    response_format = getattr(body, "response_format", None)
    if response_format is not None and response_format.get("type") != "text":
        given.append(("response_format", _from_format(response_format)))
    for names in (_GUIDED, _LLAMA_CPP):
        for name, constraint in names.items():
            value = getattr(body, name)
            if value == "" and names is _GUIDED:  # only llama.cpp's clients send "" for none
                raise RequestError(f"{name} is empty; give a format, or leave the field out.", param=name)
            if value not in (None, ""):
                given.append((name, {constraint: value}))
    if body.structured_outputs is not None:
        given.append(("structured_outputs", _from_vllm(body.structured_outputs)))
    if body.structural_tag is not None:
        given.append(("structural_tag", _from_tag(_parsed("structural_tag", body.structural_tag))))
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(name for name, _ in given)} are given; an answer can have only one format.",
            param=given[1][0],
        )
    if not given:
        return None, ""
    [(name, fields)] = given
    return named(name, lambda: Structured.from_value(fields)), name


def named(param: str, work: Any) -> Any:
    """Call `work`; a RequestError gets the name of the field as its param."""
    try:
        return work()
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param, code=error.code) from None


def _from_format(response_format: dict[str, Any]) -> dict[str, Any]:
    format_type = response_format.get("type")
    if format_type == "json_object":
        schema = response_format.get("schema")
        return {"json_object": True} if schema is None else {"json": schema}
    if format_type == "json_schema":
        given = response_format.get("json_schema", response_format)
        if not isinstance(given, dict) or not isinstance(given.get("schema"), dict | bool):
            raise RequestError("response_format.json_schema has no schema; give one.", param="response_format")
        return {"json": _strict(given["schema"]) if given.get("strict") else given["schema"]}
    if format_type == "structural_tag":
        return _from_tag(response_format)
    if format_type in ("regex", "grammar"):  # other servers' extensions
        return {format_type: response_format.get("pattern" if format_type == "regex" else "grammar")}
    raise RequestError(
        f"response_format of type {format_type!r:.60} is not supported; give text, json_object, json_schema or"
        " structural_tag.",
        param="response_format",
        code="unsupported_parameter",
    )


def _strict(schema: Any) -> Any:
    """A schema in strict mode: objects allow only their named properties by default.

    Nothing is added below allOf, since each of its schemas names only some of the properties.
    """
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {
        name: value
        if name in ("enum", "const", "default", "examples", "allOf", "if", "not")
        else _strict_each(name, value)
        for name, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and not {"allOf", "patternProperties", "$ref"} & schema.keys():
        strict.setdefault("additionalProperties", False)
    return strict


def _strict_each(name: str, value: Any) -> Any:
    """A keyword's value in strict mode; below `properties` and its like, names are no keywords."""
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


def _from_tag(structural_tag: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's structural tags, or xgrammar's `format`.

    vLLM's: {"structures": [{"begin", "schema", "end"}], "triggers": […]}
    """
    inner = structural_tag.get("format")
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
    return {"tags": _list(structural_tag.get("structures")), "triggers": structural_tag.get("triggers") or ()}


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
            raise RequestError(f"{param} is not valid JSON.", param=param) from None
    return _mapping(param, value)


# -- tools -----------------------------------------------------------------------------------------
# The text before a call's arguments and after them, and the text that triggers a call.
# %j is the name as a JSON string, %s the bare name.
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
MAX_BARE_TOOLS = 100  # of a format without a trigger: every way to begin a call is looked for
_SEVERAL = ("hermes",)  # formats in which one call may directly follow another


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """RequestError for a tool that is no function with a name, and for two of the same name."""
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
            raise RequestError(f"{where} is not a function with a name.", param=where)
        if name in seen:
            raise RequestError(f"{where} has the same name as tools[{seen[name]}]: {name!r:.60}.", param=where)
        seen[name] = number


def asked_tools(body: ChatRequest, form: ToolFormat | None) -> tuple[Structured | None, bool]:
    """The format of the answer's tool calls, and whether it must be enforced.

    It must be if a tool is required, named or strict. Raises RequestError for a wrong
    `tool_choice`, and if the model's format `form` cannot be enforced for a required call.
    """
    choice = body.tool_choice
    if not isinstance(choice, dict) and choice not in (None, "none", "auto", "required"):
        raise RequestError(
            f"tool_choice is {choice!r:.60}; expected 'auto', 'none', 'required' or a named tool.", param="tool_choice"
        )
    tools, must = _chosen_tools(body, choice)
    if not tools or choice == "none":
        return None, False
    written = _CALLS.get(form.name) if form is not None else None
    if form is None or written is None:
        if must:
            raise RequestError(
                "tool_choice: how this model writes calls is not one of the formats that can be enforced"
                f" ({', '.join(_CALLS)}); give 'auto', or start the server with --tool-parser.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return None, False
    begin, end, trigger = written
    if trigger is None and not must and len(tools) > MAX_BARE_TOOLS:
        return None, False
    tags: list[dict[str, Any]] = []
    for tool in tools:
        name, schema = tool["name"], tool.get("parameters")
        schema = {"type": "object"} if schema in (None, {}) else schema
        if isinstance(schema, dict) and tool.get("strict"):
            schema = _strict(schema)
        quoted = json.dumps(name, ensure_ascii=False)
        for template in (begin,) if trigger is not None or must else _llama_begins(begin):
            tags.append({"begin": template.replace("%j", quoted).replace("%s", name), "schema": schema, "end": end})
    single = body.parallel_tool_calls is False or isinstance(choice, dict) or form.name not in _SEVERAL
    fields: dict[str, Any] = {"tags": tags, "stop_after_first": single, "at_least_one": must, "whitespace": "single"}
    if not must and trigger is not None:
        fields["triggers"] = (trigger,)
    elif not must:  # nothing opens a call: an answer that begins like a call is one
        beginnings = [re.split(r",\s*\"parameters\"", tag["begin"])[0] for tag in tags]
        fields |= {"triggers": tuple(dict.fromkeys(beginnings)), "at_start": True, "stop_after_first": True}
    strict = must or any(tool.get("strict") for tool in tools)
    return named("tools", lambda: Structured.from_value(fields)), strict


def _chosen_tools(body: ChatRequest, choice: str | dict[str, Any] | None) -> tuple[list[dict[str, Any]], bool]:
    """The functions that the answer may call, and whether it must call one of them."""
    tools = [tool["function"] for tool in body.tools or ()]
    wanted = _wanted(choice)
    if wanted is not None:
        tools = [tool for tool in tools if tool["name"] == wanted]
    must = wanted is not None or choice == "required"
    if must and not tools:
        reason = (
            f"names {wanted!r:.60}, which is not among the tools" if wanted else "is 'required' and there are no tools"
        )
        raise RequestError(f"tool_choice {reason}.", param="tool_choice")
    return tools, must


def _llama_begins(begin: str) -> Iterator[str]:
    """The ways Llama 3 begins a call: with or without its control token, a type, spaces."""
    for text in (begin, begin.replace('{"name"', '{"type": "function", "name"')):
        for spaced in (text, text.replace('": ', '":').replace(', "', ',"')):
            yield from (spaced, f"<|python_tag|>{spaced}")


def _wanted(choice: str | dict[str, Any] | None) -> str | None:
    """The named tool: {"type": "function", "function": {"name": …}}, or {"type", "name"}."""
    if not isinstance(choice, dict):
        return None
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"tool_choice is {choice!r:.80}; expected the name of a tool.", param="tool_choice")
    return name


def joined(structure: Structured | None, tools: Structured | None) -> Structured | None:
    """A format that allows either a tool call or the answer's own format.

    Raises RequestError if the answer's format is not JSON.
    """
    if structure is None or tools is None or tools.at_least_one:
        return tools or structure
    if structure.json is None and not structure.json_object:
        raise RequestError(
            "tools can be combined only with a JSON format of the answer; give tool_choice 'none' or leave the"
            " format out.",
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
    """The format after the reasoning, if the model reasons and the prompt has not closed it."""
    tail = prompt.rstrip()
    if form is None or tail.endswith(form.end) or structure.after is not None:
        return structure
    return replace(structure, after=form.end, after_begin=None if tail.endswith(form.start) else form.start)
