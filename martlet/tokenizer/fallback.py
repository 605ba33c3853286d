"""Chat templates for models whose file has none (read `chat_template.py` next).

The control tokens of the vocabulary tell which form a model was trained on; a model without any gets plain text. A
fallback is a guess, so whoever uses one is told.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["fallback_template"]

_FORMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("<start_of_turn>", "<end_of_turn>"),
        "Gemma's turns",
        # Gemma has no system role: its text goes before the first user's, as Google's own templates do.
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


def fallback_template(has_token: Callable[[str], bool]) -> tuple[str, str]:
    """Return (template, its form in words) for the first form whose control tokens the vocabulary has."""
    for tokens, form, source in _FORMS:
        if all(map(has_token, tokens)):
            return source, form
    raise AssertionError("the last form needs no tokens")
