"""/v1/messages: Anthropic's API, whole and as a stream.

Read `conversation.py` next, which the other chat APIs share.

Format: https://docs.anthropic.com/en/api/messages and …/messages-streaming
"""

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.outputs import Piece, RequestOutput
from martlet.errors import RequestError
from martlet.server.body import Body, Parsed
from martlet.server.conversation import OpenChat, as_chat, chat_prompt, open_chat
from martlet.server.error_replies import ApiError, anthropic_error
from martlet.server.protocol import ChatRequest
from martlet.server.replies import json_reply
from martlet.server.service import Service, new_id, service_of
from martlet.server.sse import EventStream, event
from martlet.server.tools.parts import Arguments, Call, Content, Part, Reasoning
from martlet.server.tools.reply import Parts


class MessagesRequest(Body):
    """The body of /v1/messages; count_tokens takes the same fields without max_tokens."""

    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # {"type": "json_schema", "schema": {…}}
    output_config: dict[str, Any] | None = None  # {"format": as output_format, "effort": …}
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    parsed = await service.parse(request, MessagesRequest)
    if parsed.body.max_tokens is None:
        raise RequestError("max_tokens is missing.", param="max_tokens", code="missing_field")
    chat = await open_chat(request, _as_chat(parsed), new_id(request, "msg"), _warnings(service, parsed))
    encoder = _Encoder(service, chat)
    if parsed.body.stream:
        return EventStream(request, chat.ticket, encoder, service.settings)
    [output] = await service.whole(request, chat.ticket)
    return json_reply(_whole(service, chat, output))


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has."""
    service = service_of(request)
    parsed = await service.parse(request, MessagesRequest)
    body = _as_chat(parsed).body
    service.check_model(body.model)
    prompt = await service.text(lambda: chat_prompt(service, body, ""))
    return json_reply({"input_tokens": len(prompt.ids)})


# -- from Anthropic's format to OpenAI's -----------------------------------------------------------
def _as_chat(parsed: Parsed[MessagesRequest]) -> Parsed[ChatRequest]:
    body, config = parsed.body, parsed.body.output_config or {}
    given: dict[str, Any] = {
        "model": body.model,
        "stream": body.stream,
        "messages": [
            *_system(body.system),
            *(entry for i, message in enumerate(body.messages) for entry in _message(message, i)),
        ],
        "tools": [_tool(tool, number) for number, tool in enumerate(body.tools or ()) if not _is_hosted(tool)] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": False if (body.tool_choice or {}).get("disable_parallel_tool_use") else None,
        "response_format": body.output_format or config.get("format"),
        "reasoning_effort": config.get("effort"),
        "user": None if body.metadata is None else body.metadata.get("user_id"),
    }
    if (thinking := (body.thinking or {}).get("type", "adaptive")) != "adaptive":  # the template's default
        if thinking not in ("enabled", "disabled"):
            raise RequestError("thinking.type is none of adaptive, enabled and disabled.", param="thinking.type")
        given["chat_template_kwargs"] = {"enable_thinking": thinking == "enabled"}
    last = given["messages"][-1] if given["messages"] else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        given["continue_final_message"] = True
    params = dict(parsed.params)
    if body.max_tokens is not None:
        params["max_tokens"] = body.max_tokens
    if body.stop_sequences:
        params["stop"] = body.stop_sequences
    return Parsed(as_chat(given), params)


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": system if isinstance(system, str) else _texts(system, "system")}]


def _message(message: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """A message in OpenAI's format; each tool result becomes a message of its own."""
    where = f"messages[{number}]"
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role is {role!r:.60}; expected user, assistant or system.", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content is neither text nor a list of blocks.", param=f"{where}.content")
    results = [_result(block, f"{where}.content") for block in content if block.get("type") == "tool_result"]
    calls = [_call(block) for block in content if block.get("type") == "tool_use"]
    thoughts = [str(block.get("thinking", "")) for block in content if block.get("type") == "thinking"]
    others = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in content if block.get("type") not in others]
    chat_message: dict[str, Any] = {"role": role, "content": _texts(rest, f"{where}.content")}
    if calls:
        chat_message["tool_calls"] = calls
    if thoughts:
        chat_message["reasoning_content"] = "".join(thoughts)
    return [*results, chat_message] if rest or calls or thoughts or not results else results


def _texts(blocks: list[dict[str, Any]], where: str) -> str:
    for number, block in enumerate(blocks):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RequestError(
                f"{where}[{number}] is a block of type {block.get('type')!r:.60}; this model takes text only.",
                param=f"{where}[{number}].type",
            )
    return "".join(block["text"] for block in blocks)


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else _texts(content, where)
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": str(block.get("name", "")), "arguments": block.get("input") or {}}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or tool.get("type") not in (None, "custom"):
        raise RequestError(f"tools[{number}] is no tool with a name and an input_schema.", param=f"tools[{number}]")
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema") or {},
    }
    return {"type": "function", "function": function}


def _is_hosted(tool: dict[str, Any]) -> bool:
    return isinstance(tool.get("type"), str) and tool["type"] != "custom"


def _warnings(service: Service, parsed: Parsed[MessagesRequest]) -> list[str]:
    left_out = [f"tools[{i}].type" for i, tool in enumerate(parsed.body.tools or ()) if _is_hosted(tool)]
    left_out += [
        f"output_config.{name}" for name in parsed.body.output_config or {} if name not in ("format", "effort")
    ]
    return [*parsed.warnings, *service.left_out(left_out)]


def _tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    choice_type = None if choice is None else choice.get("type")
    if choice_type == "tool" and choice is not None:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {None: None, "auto": "auto", "none": "none", "any": "required"}.get(choice_type, choice)


# -- the answer ------------------------------------------------------------------------------------
def _usage(output: RequestOutput) -> dict[str, int]:
    metrics = output.metrics
    assert metrics is not None
    return {
        "input_tokens": metrics.n_prompt - metrics.n_cached,
        "cache_read_input_tokens": metrics.n_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": metrics.n_generated,
    }


def _ending(finish: str | None, stop: int | str | None, called: bool) -> dict[str, Any]:
    if finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def _head(service: Service, chat: OpenChat) -> dict[str, Any]:
    return {"id": chat.ticket.ticket_id, "type": "message", "role": "assistant", "model": service.model}


def _whole(service: Service, chat: OpenChat, output: RequestOutput) -> dict[str, Any]:
    [completion], [parser] = output.outputs, chat.parsers
    parts = Parts.of([*parser.feed(completion.text), *parser.finish()])
    content: list[dict[str, Any]] = []
    if parts.reasoning:
        content.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.content or not parts.calls:
        content.append({"type": "text", "text": parts.content})
    content += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _object(arguments)}
        for call, arguments in parts.calls
    ]
    ending = _ending(completion.finish_reason, completion.stop_reason, bool(parts.calls))
    reply = {**_head(service, chat), "content": content, **ending, "usage": _usage(output)}
    return reply | ({"warnings": chat.warnings} if chat.warnings else {})


def _object(arguments: str) -> Any:
    """A call's arguments; text that is no JSON object, since it was cut off, under "_text"."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_text": arguments}


class _Encoder:
    """The events of a streamed message: blocks, one after the other."""

    def __init__(self, service: Service, chat: OpenChat) -> None:
        self._service, self._chat = service, chat
        self._index = -1
        self._open_type: type[Part] | None = None  # of the open block's parts
        self._called = False
        self._last: Piece | None = None

    def begin(self) -> bytes:
        """The start of a message without content."""
        [output] = self._chat.ticket.outputs
        message = {**_head(self._service, self._chat), "content": [], "stop_reason": None, "stop_sequence": None}
        return _named({"type": "message_start", "message": {**message, "usage": _usage(output)}})

    def piece(self, number: int, piece: Piece) -> bytes:
        [parser] = self._chat.parsers
        parts = parser.feed(piece.text)
        if piece.finish_reason is not None:
            parts += parser.finish()
            self._last = piece
        return b"".join(self._part(part) for part in parts)

    def end(self) -> bytes:
        """The end of the last block and of the message, with the stop reason."""
        [output] = self._chat.ticket.outputs
        finish, stop = (self._last.finish_reason, self._last.stop_reason) if self._last else (None, None)
        delta = _ending(finish, stop, self._called)
        more = {"warnings": self._chat.warnings} if self._chat.warnings else {}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(output), **more}
        empty = self._open(Content, {"type": "text", "text": ""}) if self._index < 0 else b""
        return empty + self._close() + _named(last) + _named({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return _named(anthropic_error(error))

    def _part(self, part: Part) -> bytes:
        match part:
            case Reasoning(text):
                block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": text}
            case Content(text):
                block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
            case Call(_, call_id, name):
                self._called = True
                return self._open(Arguments, {"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Arguments(_, text):
                block, delta = {}, {"type": "input_json_delta", "partial_json": text}
        opened = b"" if self._open_type is type(part) else self._open(type(part), block)
        return opened + _named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _open(self, part_type: type[Part], block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._index += 1
        self._open_type = part_type
        return closed + _named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._open_type is None:
            return b""
        self._open_type = None
        return _named({"type": "content_block_stop", "index": self._index})


def _named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
