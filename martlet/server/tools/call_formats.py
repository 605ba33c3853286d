"""How model families write tool calls and reasoning: a table (read `calls.py` next, which uses it).

    Hermes, Qwen   <tool_call>{"name": "f", "arguments": {…}}</tool_call> …
    Qwen3-Coder    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    GLM-4.5        <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    Llama 3        {"name": "f", "parameters": {…}}; …, the whole answer
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {…}}, …] or [TOOL_CALLS]f[ARGS]{…}
    DeepSeek       <｜tool▁call▁begin｜>function<｜tool▁sep｜>f ```json {…} ```<｜tool▁call▁end｜>
                   or f<｜tool▁sep｜>{…}
    Granite, Phi-4 <|tool_call|>[{"name": "f", "arguments": {…}}, …]<|/tool_call|>
    Phi-4-mini     functools[{"name": "f", "arguments": {…}}, …]
    pythonic       [f(a=1), g(b="x")], the whole answer
    gpt-oss        channels: `harmony.py`

Sources: the chat templates of the models named, as published with their weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from martlet.errors import RequestError, nearest


@dataclass(frozen=True, slots=True)
class Tags:
    """How a call is written whose arguments are in tags: patterns, matched where the text stands.

    An argument's groups are its name and its value.
    """

    name: str  # its first group is the function's name
    argument: str
    close: str  # the text that ends an argument
    end: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written in the text."""

    name: str
    signs: tuple[str, ...]  # texts in the chat templates of models that use this format
    starts: tuple[str, ...]  # marks that start calls, anywhere in the text
    ends: tuple[str, ...] = ()  # marks that may follow a call
    bare: bool = False  # calls without a mark may also be the whole answer
    header: str | None = None  # a pattern before the arguments; its first group is the name
    tags: Tags | None = None
    pythonic: bool = False
    id_length: int = 24
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    other_keys: tuple[str, ...] = ("type", "id")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around the reasoning at the start of an answer."""

    name: str
    start: str
    end: str
    special: bool = False  # the marks are control tokens, which text leaves out by default


_DEEPSEEK_HEADER = r"(?:function<｜tool▁sep｜>)?\s*([\w.:-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*"

# "auto" uses the first entry with a sign in the template.
TOOLS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            ToolFormat(
                "deepseek",
                ("<｜tool▁call▁begin｜>",),
                ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
                ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
                header=_DEEPSEEK_HEADER,
            ),
            ToolFormat(
                "mistral",
                ("[TOOL_CALLS]",),
                ("[TOOL_CALLS]",),
                header=r"\s*([\w.:-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*",
                id_length=9,  # the template refuses other lengths in the next turn
            ),
            ToolFormat(
                "qwen3_coder",
                ("<function=",),
                ("<tool_call>",),
                tags=Tags(
                    r"\s*<function=\s*([^>\s]+)\s*>",
                    r"\s*<parameter=\s*([^>]+?)\s*>\n?(.*?)\n?</parameter>",
                    "</parameter>",
                    r"\s*(?:</function>\s*)?</tool_call>",
                ),
            ),
            ToolFormat(
                "glm",
                ("<arg_key>",),
                ("<tool_call>",),
                tags=Tags(
                    r"\s*([\w.:-]+)\s*(?=<)",
                    r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>",
                    "</arg_value>",
                    r"\s*</tool_call>",
                ),
            ),
            ToolFormat("harmony", ("<|channel|>",), ()),  # `harmony.py`
            ToolFormat("granite", ("<|tool_call|>",), ("<|tool_call|>",), ("<|/tool_call|>",)),
            ToolFormat("hermes", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",)),
            ToolFormat("phi", ("functools",), ("functools",)),
            ToolFormat("llama", ("<|python_tag|>", '"parameters":'), ("<|python_tag|>",), ("<|eom_id|>",), bare=True),
            ToolFormat("pythonic", ("func_name1(",), (), bare=True, pythonic=True),
        )
    }
)

REASONING: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "think": ReasoningFormat("think", "<think>", "</think>"),
        "harmony": ReasoningFormat(
            "harmony",
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            special=True,
        ),
        "mistral": ReasoningFormat("mistral", "[THINK]", "[/THINK]", special=True),
    }
)


def tool_format(wanted: str, template: str) -> ToolFormat | None:
    """The format of this name; None for "none"; for "auto" the template's, if any.

    Raises RequestError for an unknown name.
    """
    if wanted == "auto":
        return next((entry for entry in TOOLS.values() if any(sign in template for sign in entry.signs)), None)
    return TOOLS[_checked("tool_parser", wanted, TOOLS)] if wanted != "none" else None


def reasoning_format(wanted: str, template: str) -> ReasoningFormat | None:
    """The reasoning's format, chosen like `tool_format`."""
    if wanted == "auto":
        if "<|channel|>" in template:
            return REASONING["harmony"]
        return next((entry for entry in REASONING.values() if entry.end in template), None)
    return REASONING[_checked("reasoning_parser", wanted, REASONING)] if wanted != "none" else None


def _checked(param: str, name: str, table: Mapping[str, object]) -> str:
    if name not in table:
        known = ", ".join(("auto", "none", *table))
        raise RequestError(f"{param} is {name!r}; expected one of {known}.{nearest(name, table)}", param=param)
    return name
