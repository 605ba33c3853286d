"""/v1/responses: OpenAI's newer API without stored state: each request has the whole conversation.

Read `conversation.py` next, which the other chat APIs share.
Format: https://platform.openai.com/docs/api-reference/responses
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.outputs import Piece, RequestOutput
from martlet.errors import RequestError
from martlet.server.body import Body, Parsed
from martlet.server.conversation import OpenChat, as_chat, open_chat
from martlet.server.error_replies import ApiError
from martlet.server.protocol import ChatRequest
from martlet.server.replies import json_reply, usage_of
from martlet.server.service import Service, new_id, service_of
from martlet.server.sse import EventStream, event
from martlet.server.tools.parts import Arguments, Call, Content, Part, Reasoning

_STATE = "this server keeps no conversations: send all of it as input"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "background": "requests run while their client waits",
        "conversation": _STATE,
        "previous_response_id": _STATE,
        "prompt": "prompts are not kept here: send the text as input",
        "max_tool_calls": "tools are the client's to run",
    }
)


class ResponsesRequest(Body):
    """The body of /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def responses(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    parsed = await service.parse(request, ResponsesRequest)
    body = parsed.body
    try:
        chat = await open_chat(request, _as_chat(parsed), new_id(request, "resp"), _warnings(service, parsed))
    except RequestError as error:
        error.param = "text.format" if error.param == "response_format" else error.param
        raise
    writer = _Writer(service, body, chat)
    if body.stream:
        return EventStream(request, chat.ticket, writer, service.settings)
    [output] = await service.whole(request, chat.ticket)
    return json_reply(writer.whole(output))


# -- from this format to that of chat completions --------------------------------------------------
def _as_chat(parsed: Parsed[ResponsesRequest]) -> Parsed[ChatRequest]:
    body = parsed.body
    for name, value in (body.model_extra or {}).items():
        if name in _REFUSED and value:
            raise RequestError(f"{name} is not supported: {_REFUSED[name]}.", param=name, code="unsupported_parameter")
    if body.truncation not in (None, "disabled"):
        raise RequestError("truncation: only 'disabled' is supported; a long input is refused.", param="truncation")
    response_format = (body.text or {}).get("format")
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _messages(body.input)
    given = {
        "model": body.model,
        "stream": body.stream,
        "messages": [*system, *items],
        "tools": [_tool(tool, number) for number, tool in enumerate(body.tools or ()) if not _is_hosted(tool)] or None,
        "tool_choice": body.tool_choice,
        "response_format": response_format,
        "parallel_tool_calls": body.parallel_tool_calls,
        "user": body.user or body.prompt_cache_key or body.safety_identifier,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "chat_template_kwargs": body.chat_template_kwargs,
        "max_completion_tokens": body.max_output_tokens,
    }
    return Parsed(as_chat(given), dict(parsed.params))


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an input's items; calls join the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where, item_type = f"input[{number}]", item.get("type", "message")
        if item_type == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")})
        elif item_type == "function_call":
            function = {"name": str(item.get("name", "")), "arguments": str(item.get("arguments", ""))}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item_type == "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
        elif item_type != "reasoning":  # of an earlier answer: templates leave it out
            raise RequestError(
                f"{where} is an item of type {item_type!r:.60}; expected message, function_call or function_call_output.",
                param=f"{where}.type",
            )
    return messages


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    texts = []
    for number, block in enumerate(content):
        block_type = block.get("type") if isinstance(block, dict) else None
        if block_type not in ("input_text", "output_text", "text"):
            raise RequestError(
                f"{where}[{number}] is a part of type {block_type!r:.60}; this model takes text only.",
                param=f"{where}[{number}].type",
            )
        texts.append({"type": "text", "text": block.get("text")})
    return texts


def _is_hosted(tool: dict[str, Any]) -> bool:
    return isinstance(tool.get("type"), str) and tool["type"] != "function"


def _warnings(service: Service, parsed: Parsed[ResponsesRequest]) -> list[str]:
    body = parsed.body
    left_out = [f"tools[{i}].type" for i, tool in enumerate(body.tools or ()) if _is_hosted(tool)]
    left_out += [f"text.{name}" for name in body.text or {} if name != "format"]
    left_out += [f"reasoning.{name}" for name, value in (body.reasoning or {}).items() if name != "effort" and value]
    left_out += ["include"] if body.include else []
    return [*parsed.warnings, *service.left_out(left_out)]


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"tools[{number}] is of type {tool.get('type')!r:.60}; this server has function tools only.",
            param=f"tools[{number}].type",
            code="unsupported_parameter",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


# -- the answer ------------------------------------------------------------------------------------
_TEXT = "output_text"
_REASONING = "reasoning_text"


class _ItemWriter:
    """Builds the output items, and the events of their growth.

    One item is open at a time: a message, a function call or reasoning. Format:
    https://platform.openai.com/docs/api-reference/responses-streaming
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._type: str | None = None  # the open item's

    def add(self, part: Part) -> list[dict[str, Any]]:
        """Add a part of the answer; return its events."""
        match part:
            case Reasoning(text):
                return [*self._opened("reasoning"), *self._more(_REASONING, text)]
            case Content(text):
                return [*self._opened("message"), *self._more(_TEXT, text)]
            case Call(_, call_id, name):
                item = {"type": "function_call", "id": _id("fc"), "call_id": call_id, "name": name, "arguments": ""}
                return [*self.close(), *self._open("function_call", {**item, "status": "in_progress"})]
            case Arguments(_, text):
                self.items[-1]["arguments"] += text
                return [self._at("response.function_call_arguments.delta", delta=text)]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        if self._type is None:
            return []
        item, item_type, self._type = self.items[-1], self._type, None
        item["status"] = status
        events = []
        if item_type == "function_call":
            events.append(
                self._at("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            )
        else:
            part = item["content"][0]
            events.append(
                self._at(f"response.{part['type']}.done", content_index=0, text=part["text"], **_logprobs(part))
            )
            events.append(self._at("response.content_part.done", content_index=0, part=deepcopy(part)))
        return [*events, self._item("response.output_item.done")]

    def _opened(self, item_type: str) -> Iterator[dict[str, Any]]:
        if self._type == item_type:
            return
        yield from self.close()
        if item_type == "message":
            item: dict[str, Any] = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant"}
            part: dict[str, Any] = {"type": _TEXT, "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": []}
            part = {"type": _REASONING, "text": ""}
        yield from self._open(item_type, {**item, "content": []})
        self.items[-1]["content"].append(part)
        yield self._at("response.content_part.added", content_index=0, part=deepcopy(part))

    def _open(self, item_type: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._type = item_type
        self.items.append(item)
        yield self._item("response.output_item.added")

    def _more(self, item_type: str, text: str) -> Iterator[dict[str, Any]]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        yield self._at(f"response.{item_type}.delta", content_index=0, delta=text, **_logprobs(part))

    def _item(self, name: str) -> dict[str, Any]:
        return {"type": name, "output_index": len(self.items) - 1, "item": deepcopy(self.items[-1])}

    def _at(self, item_type: str, **more: Any) -> dict[str, Any]:
        return {"type": item_type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if part["type"] == _TEXT else {}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class _Writer:
    """Writes a response, whole or as a stream of events."""

    def __init__(self, service: Service, body: ResponsesRequest, chat: OpenChat) -> None:
        self._service, self._body, self._chat = service, body, chat
        self._created = int(time.time())
        self._items = _ItemWriter()
        self._finish: str | None = None
        self._number = 0

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        [completion], [parser] = output.outputs, self._chat.parsers
        for part in [*parser.feed(completion.text), *parser.finish()]:
            self._items.add(part)
        self._finish = completion.finish_reason
        self._items.close(self._status())
        return self._response(self._status())

    def begin(self) -> bytes:
        """The events of a response without output."""
        response = self._response("in_progress")
        return self._event({"type": "response.created", "response": response}) + self._event(
            {"type": "response.in_progress", "response": response}
        )

    def piece(self, number: int, piece: Piece) -> bytes:
        [parser] = self._chat.parsers
        parts = parser.feed(piece.text)
        if piece.finish_reason is not None:
            parts += parser.finish()
            self._finish = piece.finish_reason
        return b"".join(self._event(data) for part in parts for data in self._items.add(part))

    def end(self) -> bytes:
        """The end of the last item, and the whole response."""
        status = self._status()
        closed = b"".join(self._event(data) for data in self._items.close(status))
        return closed + self._event({"type": f"response.{status}", "response": self._response(status)})

    def error(self, error: ApiError) -> bytes:
        response = self._response("failed") | {"error": {"code": error.code or "server_error", "message": str(error)}}
        return self._event({"type": "response.failed", "response": response})

    def _status(self) -> str:
        return "completed" if self._finish == "stop" else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        body, [output] = self._body, self._chat.ticket.outputs
        params = self._chat.ticket.prepared[0].request.params
        reason = {"length": "max_output_tokens"}.get(self._finish or "", self._finish)
        response = {
            "id": self._chat.ticket.ticket_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._service.model,
            "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status in ("in_progress", "failed") else _usage(output),
            "user": body.user,
            "metadata": body.metadata or {},
        }
        return response | ({"warnings": self._chat.warnings} if self._chat.warnings else {})

    def _event(self, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({**data, "sequence_number": self._number - 1}, data["type"])


def _usage(output: RequestOutput) -> dict[str, Any]:
    usage = usage_of([output])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
