"""From a prompt and parameters to a request of the engine (read `driver.py` next, which runs it).

    messages → template → text → ids (earlier answers' own ids) ─┐
    text or ids ─────────────────────────────────────────────────┴→ parameters resolved → Prepared

The offline API and the server use the same `RequestMaker`, so both read a prompt alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from martlet.engine.build import Built
from martlet.engine.driver import Prepared
from martlet.engine.outputs import RequestOutput
from martlet.engine.params import ParamsLike, resolve_params, with_seed
from martlet.engine.prompts import ChatOptions, Message, PromptTokens, check_chat_options, truncated
from martlet.errors import RequestError
from martlet.tokenizer.chat_template import ChatTemplate
from martlet.tokenizer.turns import TurnMemory
from martlet.types import Request, Scheduling

_REWRITES = (
    "The chat template changes an earlier answer (it may drop the reasoning): the conversation is computed"
    " again from there on."
)


def scheduling_of(prompt: PromptTokens, scheduling: Scheduling | None) -> Scheduling:
    """A request's scheduling, with the prompt's own salt if any. RequestError for another type."""
    if not isinstance(scheduling, Scheduling | None):
        raise RequestError(
            f"scheduling is of type {type(scheduling).__name__}; expected Scheduling(…).", param="scheduling"
        )
    scheduling = scheduling or Scheduling()
    return replace(scheduling, cache_salt=prompt.cache_salt) if prompt.cache_salt else scheduling


class RequestMaker:
    """Makes requests for one model. Threads may share it."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._turns = TurnMemory(built.tokenizer) if built.config.exact_turns else None

    def chat_tokens(self, messages: Sequence[Message], options: ChatOptions) -> PromptTokens:
        """Render a conversation and tokenize it.

        Raises RequestError for a wrong option, and for tools that the template would leave out.
        """
        built = self._built
        check_chat_options(options)
        source = options.get("chat_template")
        template = built.template if source is None else ChatTemplate(source, built.tokenizer)
        continued = bool(options.get("continue_final_message"))
        rendered = template.render(
            messages,
            tools=options.get("tools"),
            add_generation_prompt=options.get("add_generation_prompt"),
            continue_final_message=continued,
            **(options.get("chat_template_kwargs") or {}),
        )
        salt = options.get("cache_salt") or ""
        if "tools" in rendered.unread:
            raise RequestError(
                "The chat template does not use tools, so the model would never see them. Leave tools out, or give a"
                " chat_template that writes them.",
                param="tools",
            )
        warnings = tuple(f"The chat template reads no variable {name!r}: it has no effect." for name in rendered.unread)
        if self._turns is None:
            return PromptTokens(template.prompt_ids(rendered), rendered.text, rendered, salt, warnings)
        warnings += (_REWRITES,) if self._turns.is_rewritten(rendered, messages, salt) else ()
        return PromptTokens(self._turns.prompt_ids(template, rendered, salt), rendered.text, rendered, salt, warnings)

    def asked(
        self,
        request_id: str,
        prompt: PromptTokens,
        params: ParamsLike,
        scheduling: Scheduling | None = None,
        adapter: str = "",
    ) -> Prepared:
        """An engine's request; `adapter` is a digest, or "". RequestError for wrong parameters."""
        built = self._built
        resolved, settings = with_seed(*resolve_params(params, built.suggested), built.seeds)
        if resolved.structured is not None and built.grammars is not None:
            # now, so that the engine's thread does not wait for it
            built.grammars.compile(resolved.structured)
        scheduling = scheduling_of(prompt, scheduling)
        ids = truncated(prompt.ids, resolved, built.plan.context)
        request = Request(request_id, ids, resolved, prompt.text, scheduling=scheduling, adapter=adapter)
        return Prepared(request, settings, prompt.warnings, self._noting(prompt, ids))

    def _noting(self, prompt: PromptTokens, ids: Sequence[int]) -> Callable[[RequestOutput], None]:
        """A callback that remembers a chat's answer for the next turn's prompt."""
        turns, rendered = self._turns, prompt.rendered

        def note(output: RequestOutput) -> None:
            if turns is None or rendered is None or len(ids) < len(prompt.ids):
                return
            for answer in output.outputs:
                turns.note(rendered, ids, answer.token_ids, answer.text, prompt.cache_salt)

        return note
