"""Chat templates: from messages to the prompt that a model was trained on.

    messages → checked, control tokens set aside (chat_messages.py) → template (sandbox.py)
             → text, literal spans → ids

The text is what Hugging Face's `apply_chat_template` renders. A template is part of a model file
and so untrusted: whatever it does, the caller gets a text or a RequestError. Read
`chat_messages.py` next.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from martlet.errors import RequestError
from martlet.tokenizer.chat_messages import Shield, normalize_messages

MAX_SOURCE = 1 << 20  # characters; the longest template known is under 30,000
MAX_MESSAGE = 2000  # characters of a template's own error text
RESERVED = frozenset(("messages", "tools", "add_generation_prompt"))


# Forms for a model whose file has no template: the control tokens that tell it, its name, the
# template.
_FORMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("<start_of_turn>", "<end_of_turn>"),
        "Gemma's turns",
        # Gemma has no system role: its text goes before the first user's, as Google's own templates
        # do.
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content + '\\n\\n' %}{% else %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + ns.system + m.content | trim"
        " + '<end_of_turn>\\n' }}{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    (
        ("<|im_start|>", "<|im_end|>"),
        "ChatML",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ),
    (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "Llama 3's headers",
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    (
        (),
        "plain text (User: … Assistant: …)",
        "{% for m in messages %}{{ m.role | capitalize + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    ),
)


class ChatTokenizer(Protocol):
    """The methods of a tokenizer that a chat template needs."""

    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    special_ids: frozenset[int]

    def token_text(self, token: int) -> str:
        """A token's text."""

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        literal_spans: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """The ids of a text."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt's text, and the ranges [start, stop) whose control tokens are plain text."""

    text: str
    literal_spans: tuple[tuple[int, int], ...] = ()
    unread: tuple[str, ...] = ()  # given without effect: "tools", variables never read


class ChatTemplate:
    """A model's chat template, compiled on first use."""

    def __init__(
        self, source: str | None, tokenizer: ChatTokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`source` None takes a fallback, chosen by the vocabulary's control tokens.

        `now` is the clock.
        """
        self._tokenizer = tokenizer
        self._now = now
        self._control_texts = frozenset(tokenizer.token_text(token) for token in tokenizer.special_ids)
        self.is_fallback = source is None
        self.note: str | None = None
        if source is None:
            source, form = _fallback(self._is_token)
            self.note = (
                f"The model's file has no chat template; {form} is used. Give the right one with --chat-template if "
                "the answers look wrong."
            )
        self.source = source

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know: the template is a fallback."""
        return () if self.note is None else (self.note,)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> RenderedChat:
        """Return the prompt for a conversation.

        `continue_final_message` leaves the last message open for the model to go on with; it
        excludes `add_generation_prompt`, which is otherwise on by default. `variables` go to the
        template (enable_thinking, documents, …). RequestError for a conversation that the template
        rejects, with the template's own words if it has any.
        """
        plain = normalize_messages(messages)
        if "developer" not in self.source:
            plain = [m | {"role": "system"} if m["role"] == "developer" else m for m in plain]
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first goes on with the last "
                "message, the second opens a new one. Set one of them to false.",
                param="continue_final_message",
            )
        if RESERVED & set(variables):
            raise RequestError(
                f"The template variable {min(RESERVED & set(variables))!r} cannot be given.",
                param="chat_template_kwargs",
            )
        shield = Shield(self._control_texts, (plain, tools, variables))
        hidden = [shield.hide(message, message["role"] == "assistant") for message in plain]
        mark = shield.unused() if continue_final_message else None
        if mark is not None:
            _mark_end(hidden[-1], mark)
        given = {
            "documents": None,
            "bos_token": self._text_of(self._tokenizer.bos_id),
            "eos_token": self._text_of(self._tokenizer.eos_id),
            **shield.hide(variables),
            "messages": hidden,
            "tools": None if tools is None else [shield.hide(tool) for tool in _checked_tools(tools)],
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(given, shield.weight)
        unread = self._unread(variables)
        if tools and self._leaves_out_tools(text, given, shield.weight):
            unread += ("tools",)
        return RenderedChat(*shield.restore(text if mark is None else _cut(text, mark)), unread)

    def prompt_ids(self, rendered: RenderedChat) -> list[int]:
        """The ids of a prompt, with exactly one BOS token if the template or the model wants it."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(
            rendered.text, add_special=False, parse_special=True, literal_spans=rendered.literal_spans
        )
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            return [tokenizer.bos_id, *ids]
        return ids

    @functools.cached_property
    def _code(self) -> types.CodeType:
        # Here, because importing Jinja2 takes 40 ms.
        from martlet.tokenizer.sandbox import compile_template

        return compile_template(self._checked_source())

    def _checked_source(self) -> str:
        if len(self.source) > MAX_SOURCE:
            raise RequestError(
                f"The chat template has {len(self.source):,} characters; at most {MAX_SOURCE:,} are taken.",
                code="chat_template",
            )
        return self.source

    def _leaves_out_tools(self, text: str, given: dict[str, Any], weight: int) -> bool:
        try:
            return self._run({**given, "tools": None}, weight) == text
        except RequestError:  # it rejects the conversation without them
            return False

    def _unread(self, variables: Mapping[str, Any]) -> tuple[str, ...]:
        from martlet.tokenizer.sandbox import names_read

        return tuple(sorted(variables.keys() - names_read(self._checked_source()))) if variables else ()

    def _run(self, variables: dict[str, Any], weight: int) -> str:
        from martlet.tokenizer.sandbox import SecurityError, TemplateRaisedError, run_template

        try:
            return run_template(self._code, variables, self._now, weight + len(self.source))
        except RequestError:
            raise
        except TemplateRaisedError as error:
            message = str(error.message)[:MAX_MESSAGE]
        except SecurityError:
            message = "The chat template was stopped: it uses what a template may not use. Use another template."
        except RecursionError:
            message = "The chat template was stopped: it nests too deeply. Use another template."
        except Exception as error:  # a template can raise whatever an expression can
            message = f"The chat template failed: {' '.join(str(error).split())[:MAX_MESSAGE]}."
        raise RequestError(message, param="messages", code="chat_template") from None

    def _is_token(self, text: str) -> bool:
        return len(self._tokenizer.encode(text, add_special=False, parse_special=True)) == 1

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.token_text(token)


def _checked_tools(tools: object) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools is not a list of objects; give each tool as a JSON schema.", param="tools")
    return list(tools)


def _mark_end(message: dict[str, Any], mark: str) -> None:
    """Append a mark and a space to the content: the space tells whether the template trims."""
    if "content" not in message:
        raise RequestError("The last message has no content to continue.", param="continue_final_message")
    message["content"] += mark + " "


def _cut(text: str, mark: str) -> str:
    """Drop the mark and all text after it, and the space before it where the template trimmed."""
    at = text.rfind(mark)
    if at < 0:
        raise RequestError(
            "The chat template leaves out the end of the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _fallback(has_token: Callable[[str], bool]) -> tuple[str, str]:
    """Return (template, name of its form): the first form whose control tokens the vocabulary has.

    A fallback is a guess, so its user is told.
    """
    for tokens, form, source in _FORMS:
        if all(map(has_token, tokens)):
            return source, form
    raise AssertionError("the last form needs no tokens")
