"""`martlet chat`: a conversation with history and commands; Ctrl-C stops only the answer."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from martlet.commands.arguments import (
    MODEL_HELP,
    add_answer_options,
    add_options,
    add_sampling_options,
    only_lora,
    open_llm,
    sampling_options,
)
from martlet.commands.common import print_settings, show_warnings
from martlet.config import EngineConfig, Origin
from martlet.errors import MartletError, RequestError, nearest

if TYPE_CHECKING:
    from martlet.engine.outputs import RequestOutput
    from martlet.llm import LLM

HELP = """\
/help            show this
/reset           forget the conversation
/system TEXT     set the system message, and forget the conversation (no TEXT: show it)
/retry           answer the last message again
/save FILE       write the conversation as JSON
/load FILE       go on with a conversation that was saved
/stats           show tokens, context, settings and warnings
/why             show how much of the last prompt was cached, why not more, and how long it all took
/exit            leave (also Ctrl-D)
A line that ends in \\ goes on in the next one.
A line with \"\"\" alone starts a message of several lines; another one ends it.
Ctrl-C stops an answer; what was said of it stays in the conversation.
An answer leaves an eighth of the context for the next message, unless -n sets its limit. Once a
conversation fills three quarters of the context, the model is no longer shown its oldest messages;
the system message stays."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_answer_options(parser)
    add_options(parser, EngineConfig, "chat")
    # of no use where no numbers are shown
    unseen = ("logprobs", "prompt_logprobs", "logprobs_mode")
    add_sampling_options(parser, max_tokens="7/8 of the context with the prompt", without=unseen)


def execute(args: Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  its import gives `input` a history and editing
    params = sampling_options(args)
    with open_llm(args) as llm:
        show_warnings(llm)
        conversation = Conversation(llm, args.system, params, args.explain_cache, only_lora(args))
        if sys.stdin.isatty():
            print("/help shows the commands, /exit leaves.", file=sys.stderr)
        while True:
            try:
                message = _read_message()
            except EOFError:
                if sys.stdin.isatty():
                    print(file=sys.stderr)  # the shell's prompt starts a line
                return 0
            except KeyboardInterrupt:  # at the prompt: a fresh line, as a shell does
                print(file=sys.stderr)
                continue
            try:
                if not conversation.handle(message):
                    return 0
            except (MartletError, OSError) as error:
                print(f"martlet: {error}", file=sys.stderr)


class Conversation:
    """The messages so far, and what a line from the person does to them."""

    def __init__(
        self, llm: LLM, system: str | None, params: dict[str, object], explain: bool = False, lora: str | None = None
    ) -> None:
        self.llm = llm
        self.system = system
        self.params = params
        self.messages: list[dict[str, str]] = []  # user and assistant in turn
        self.left_out = 0  # the oldest messages, which the model is not shown any more
        self.generated = 0
        self.lora = lora  # the adapter that answers
        self.explain = explain  # the cache, after every answer
        self.last: RequestOutput | None = None
        self._warned: set[str] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: print(HELP),
            "reset": lambda _: self._reset(),
            "system": self._set_system,
            "retry": lambda _: self._retry(),
            "save": self._save,
            "load": self._load,
            "stats": lambda _: self._stats(),
            "why": lambda _: self._why(),
        }

    def handle(self, message: str) -> bool:
        """Answer a message or obey a command; False to leave. RequestError for a wrong command."""
        if message.startswith("/"):
            name, _, rest = message[1:].partition(" ")
            if name in ("exit", "quit", "bye"):
                return False
            if name not in self._commands:
                hint = nearest(name, [*self._commands, "exit"])
                raise RequestError(f"There is no command /{name}.{hint} /help shows them.", param="command")
            self._commands[name](rest.strip())
        elif message.strip():
            self._answer(message)
        return True

    def _prompt_messages(self, first: int = 0) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages[first:]]

    def _shown(self) -> tuple[list[dict[str, str]], int]:
        """The messages that the model is shown, and their tokens: if need be without the oldest.

        Leaves out more than needed, so that not every later turn computes the rest anew.
        """
        context, before = self.llm.plan.context, self.left_out
        n_ids = self._n_ids(before)
        if n_ids > context * 3 // 4:
            for start in range(before + 1, len(self.messages)):
                if self.messages[start]["role"] == "user" and n_ids > context // 2:
                    self.left_out, n_ids = start, self._n_ids(start)
        if self.left_out > before:
            print(f"[the model is not shown the oldest {self.left_out} messages: the context is full]", file=sys.stderr)
        return self._prompt_messages(self.left_out), n_ids

    def _n_ids(self, first: int) -> int:
        return len(self.llm.chat_prompt(self._prompt_messages(first))[1])

    def _answer(self, message: str) -> None:
        self.messages.append({"role": "user", "content": message})
        try:
            messages, n_ids = self._shown()
            params = {"max_tokens": max(1, self.llm.plan.context * 7 // 8 - n_ids), **self.params}
            stream = self.llm.stream_chat(messages, params, lora_request=self.lora)
        except MartletError:
            self.messages.pop()  # it was not answered: the conversation stays as it was
            raise
        said: list[str] = []
        try:
            for piece in stream:
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        finally:
            stream.close()
        print()
        self.messages.append({"role": "assistant", "content": "".join(said)})
        for warning in stream.output.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                print(f"warning: {warning}", file=sys.stderr)
        if stream.output.outputs[0].finish_reason == "length":
            print(f"[stopped at the limit of {params['max_tokens']:,} tokens, which -n sets]", file=sys.stderr)
        metrics = stream.output.metrics
        if metrics is not None:
            self.generated += metrics.n_generated
            rate = metrics.decode_tokens_per_s
            speed = f" at {rate:,.1f} tok/s" if rate else ""
            left = self.llm.plan.context - metrics.n_prompt - metrics.n_generated
            print(f"[{metrics.n_generated} tokens{speed}; {max(0, left):,} left in the context]", file=sys.stderr)
        self.last = stream.output
        if self.explain and self.last.cache is not None:
            print(self.last.cache.explain(), file=sys.stderr)

    def _retry(self) -> None:
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        if not self.messages:
            raise RequestError("There is no message to answer again.", param="command")
        self._answer(self.messages.pop()["content"])

    def _reset(self) -> None:
        self._forget()
        print("the conversation is forgotten", file=sys.stderr)

    def _forget(self) -> None:
        self.messages, self.left_out = [], 0

    def _set_system(self, text: str) -> None:
        if text:
            self.system = text
            self._forget()
        print(f"system message: {self.system if self.system is not None else '(none)'}", file=sys.stderr)

    def _save(self, name: str) -> None:
        path = _named(name, "save")
        path.write_text(json.dumps(self._prompt_messages(), ensure_ascii=False, indent=1), encoding="utf-8")
        print(f"saved {len(self.messages)} messages to {path}", file=sys.stderr)

    def _load(self, name: str) -> None:
        path = _named(name, "load")
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in saved]
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"{path} is not a saved conversation: {error!r}.", param="command") from None
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self.messages, self.left_out = messages, 0
        print(f"loaded {len(messages)} messages", file=sys.stderr)

    def _why(self) -> None:
        if self.last is None or self.last.cache is None or self.last.metrics is None:
            raise RequestError("Nothing has been answered yet.", param="command")
        print(self.last.cache.explain(), file=sys.stderr)
        numbers = self.last.metrics.as_dict()
        print(", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None), file=sys.stderr)

    def _stats(self) -> None:
        n_ids = self._n_ids(self.left_out) if self.messages else 0
        shown = f" ({self.left_out} not shown to the model)" if self.left_out else ""
        print(
            f"{len(self.messages)} messages{shown}, {n_ids:,} of {self.llm.plan.context:,} tokens of context,"
            f" {self.generated:,} tokens generated",
            file=sys.stderr,
        )
        settings = self.llm.effective_params(self.params)
        print_settings("sampling, all else default", tuple(s for s in settings if s.origin is not Origin.DEFAULT))
        drawn = [s for s in (self.last.settings if self.last else ()) if s.name == "seed" and s.value is not None]
        print_settings("seed of the last answer", tuple(drawn))
        for warning in self.llm.warnings:
            print(f"warning: {warning}", file=sys.stderr)


def _named(name: str, command: str) -> Path:
    if not name:
        raise RequestError(f"Which file? /{command} FILE.", param="command")
    return Path(name).expanduser()


def _read_message() -> str:
    """A message from stdin: a line, lines ending in a backslash, or lines between triple quotes."""
    ask = "> " if sys.stdin.isatty() else ""
    more = "… " if ask else ""
    line = input(ask)
    if line.strip() == '"""':
        lines: list[str] = []
        while (line := input(more)).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(more))
    return "\n".join(lines)
