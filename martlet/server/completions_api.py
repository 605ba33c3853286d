"""/v1/completions: completes prompts given as text, token ids or lists of them.

It supports echo, log-probabilities and best_of. Read `chat_api.py` first.

Format: https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.outputs import Logprobs, Piece, RequestOutput
from martlet.engine.prompts import tokens_of
from martlet.errors import RequestError
from martlet.server.body import Parsed
from martlet.server.bridge import Ticket
from martlet.server.protocol import CompletionRequest, prompts_of, refuse_unsupported
from martlet.server.replies import ChunkEncoder, finite, json_reply, shown_logprobs, timings_of, usage_of
from martlet.server.response_format import asked_structure
from martlet.server.service import Service, new_id, service_of
from martlet.server.sse import EventStream, EventTemplate


async def completions(request: Request) -> Response:
    """Complete prompts."""
    service = service_of(request)
    parsed = await service.parse(request, CompletionRequest)
    body, reply_id = parsed.body, new_id(request, "cmpl")
    service.check_model(body.model)
    params, scheduling = _params(parsed), service.scheduling(request, body)
    inputs, tokenizer = prompts_of(body.prompt, "prompt"), service.built.tokenizer
    prompts = await service.text(lambda: [tokens_of(entry, tokenizer) for entry in inputs])
    if len(inputs) > 1 and len(inputs) * (params.get("n") or 1) > service.settings.max_n:
        raise RequestError(
            f"{len(inputs):,} prompts and n make more than {service.settings.max_n} answers; send fewer at a time.",
            param="prompt",
        )
    params = {"max_tokens": 16} | params  # OpenAI's default here
    structure, field = asked_structure(body, params)
    if structure is not None:
        params["structured"] = await service.compile_structure(structure, field)
    prepared = [service.prepare(f"{reply_id}-{i}", prompt, params, scheduling) for i, prompt in enumerate(prompts)]
    n = prepared[0].request.params.n
    if body.stream and (prepared[0].request.params.best_of or 1) > n:
        raise RequestError("A stream cannot have best_of > n: the best are known at the end.", param="best_of")
    ticket = await service.submit(request, reply_id, prepared, streams=body.stream, timeout_s=body.timeout)
    warnings = [*parsed.warnings, *dict.fromkeys(warning for entry in prepared for warning in entry.warnings)]
    writer = _Writer(service, body, ticket, n=n, logprobs=params.get("logprobs"), warnings=warnings)
    if body.stream:
        return EventStream(request, ticket, writer, service.settings, writer.progress if body.return_progress else None)
    return json_reply(writer.whole(await service.whole(request, ticket)))


def _params(parsed: Parsed[CompletionRequest]) -> dict[str, Any]:
    body, params = parsed.body, dict(parsed.params)
    refuse_unsupported(body)
    if not isinstance(params.get("n") or 1, int):
        raise RequestError(f"n is {params['n']!r:.60}; expected a whole number.", param="n")
    if body.echo and params.get("logprobs") is not None:
        params.setdefault("prompt_logprobs", params["logprobs"])
    return params


class _Writer(ChunkEncoder):
    """Writes a ticket's choices, whole or as a stream; choice n · prompt + answer."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        ticket: Ticket,
        *,
        n: int,
        logprobs: Any,
        warnings: Sequence[str],
    ) -> None:
        super().__init__(service, body, ticket, "text_completion")
        self._service, self._body, self._n = service, body, n
        self._top = logprobs
        self._warnings = list(warnings)
        self._offsets: dict[int, int] = {}  # characters of each choice that are written
        self._n_open = n * len(ticket.prepared)

    # -- whole -------------------------------------------------------------------------------------
    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for number, output in enumerate(outputs):
            text, before = self._echo(output)
            for completion in output.outputs:
                entries = [*before, *shown_logprobs(completion)]
                choice: dict[str, Any] = {
                    "index": number * self._n + completion.index,
                    "text": text + completion.text,
                    "logprobs": None if self._top is None else self._logprobs(entries, number),
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
                if output.prompt_logprobs is not None and not self._body.echo:
                    choice["prompt_logprobs"] = self._logprobs(output.prompt_logprobs, number)
                choices.append(choice)
        reply = {**self._head, "choices": choices, "usage": usage_of(outputs)}
        return {**reply, **self._more(outputs)}

    def _echo(self, output: RequestOutput) -> tuple[str, list[Logprobs | None]]:
        """The prompt's text and its entries, if the answer repeats them."""
        if not self._body.echo:
            return "", []
        tokenizer = self._service.built.tokenizer
        text = output.prompt if output.prompt is not None else tokenizer.decode(output.prompt_token_ids)
        return text, list(output.prompt_logprobs or []) if self._top is not None else []

    def _more(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self._body.return_timings and outputs[0].metrics is not None and len(outputs) == 1:
            more["timings"] = timings_of(outputs[0])
        if self._warnings:
            more["warnings"] = self._warnings
        return more

    def _logprobs(self, entries: Sequence[Logprobs | None], number: int, offset: int = 0) -> dict[str, Any]:
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets = []
        for entry in entries:
            if entry is None:  # a prompt's first token has nothing before it
                first = self._ticket.outputs[number].prompt_token_ids[:1]
                tokens.append(self._service.built.tokenizer.decode(first, skip_special=False))
                chosen.append(None)
                top.append(None)
            else:
                token = next(iter(entry.values()))
                tokens.append(token.decoded_token)
                chosen.append(finite(token.logprob))
                top.append({logprob.decoded_token: finite(logprob.logprob) for logprob in entry.values()})
            offsets.append(offset)
            offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    # -- as a stream -------------------------------------------------------------------------------
    def piece(self, number: int, piece: Piece) -> bytes:
        """The chunk of a piece."""
        index = number * self._n + piece.index
        if piece.finish_reason is None and (template := self._templates.get(index)) is not None:
            return template.fill(piece.text)
        text, entries = piece.text, list[Logprobs | None](piece.logprobs)
        if index not in self._offsets:
            self._offsets[index] = 0
            prompt, prompt_entries = self._echo(self._ticket.outputs[number])
            text, entries = prompt + text, [*prompt_entries, *entries]
        if piece.finish_reason == "error":
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(entries, number, self._offsets[index])
            if self._top is not None and entries
            else None,
            "finish_reason": piece.finish_reason,
        }
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        self._offsets[index] += len(text)
        if self._top is None and not self._each_usage and piece.finish_reason is None:
            self._templates[index] = EventTemplate(self._chunk_of({**choice, "text": ""}), "text")
        self._n_open -= piece.finish_reason is not None
        return self._chunk_of(choice, self._more(self._ticket.outputs) if self._n_open == 0 else None)
