"""Chat templates of untrusted files: they reach nothing, take little memory, and end."""

from __future__ import annotations

import resource
import threading
import time

import pytest
from chat_cases import (
    render,
    source,
    template,
)

from martlet.errors import RequestError

# -- hostile templates -----------------------------------------------------------------------------
ESCAPES = [
    '{{ "".__class__.__mro__[1].__subclasses__() }}',
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages | attr('__class__') }}",
    "{{ range }}",
    "{{ range ~ '' }}",
    "{{ 'a'.encode('utf-8') }}",
    "{% include 'x' %}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_template_cannot_reach_python(text: str) -> None:
    """Fault TPL-08: an error, and no object's repr in it."""
    with pytest.raises(RequestError) as caught:
        render(text)
    assert "<" not in str(caught.value)


DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"
LARGE = [
    "{{ 'a' * 10**9 }}",
    "{{ ([0] * 10**9) | length }}",
    "{{ 10**9 * [messages] }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(width=10**9) }}",
    "{{ ('\\t' * 9999).expandtabs(10**4) * 100 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' | format(10**9, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ range(10**9) | list }}",
    "{{ messages | slice(10**9) | list }}",
    "{{ 'a' | indent(10**9, true) }}",
    "{{ ('\\n' * 10**5) | indent(10**3) }}",
    "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}",
    "{{ ('a' * 10**5).join(range(10**5) | map('string')) }}",
    "{{ range(10**5) | join('a' * 10**5) }}",
    "{{ [[1]] | tojson(indent=10**9) }}",
    "{{ [[1]] | tojson(indent=' ' * 10**6) }}",
    "{{ [[1]] | sum(start=[]) }}",
    DOUBLE.replace("STEP", "ns.x + ns.x"),
    DOUBLE.replace("STEP", "ns.x ~ ns.x"),
    DOUBLE.replace("STEP", "[ns.x, ns.x] | join"),
    DOUBLE.replace("STEP", "[ns.x, ns.x]"),
    DOUBLE.replace("STEP", "(ns.x, ns.x)"),
    DOUBLE.replace("STEP", "{1: ns.x, 2: ns.x}"),
    DOUBLE.replace("STEP", "dict(a=ns.x, b=ns.x)"),
    DOUBLE.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    DOUBLE.replace("STEP", "'{0}{0}'.format(ns.x)"),
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['a' * 10**6 ~ i] %}{% endfor %}",
    "{% set x = 'a' * 10**6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% set x = 'a' * 10**6 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(9999) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% if range(99999) | map('string') | select('equalto', 'x') | list %}{% endif %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% set x = 'a' * 10**6 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{{ x | upper | length }}{% endfor %}",
    "(" * 5000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "not " * 20000 + "1 }}",
    "{% for i in [1] %}" * 200 + "{% endfor %}" * 200,
]


@pytest.mark.parametrize("text", LARGE)
def test_template_cannot_take_memory(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.thread_time()
    with pytest.raises(RequestError):
        render(text)
    assert time.thread_time() - started < 6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


@pytest.mark.parametrize("text", ENDLESS, ids=range(len(ENDLESS)))
def test_template_ends_in_any_thread(text: str) -> None:
    outcome: list[object] = []

    def work() -> None:
        started = time.thread_time()
        try:
            outcome.append(render(text))
        except RequestError:
            outcome.append("refused")
        outcome.append(time.thread_time() - started)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    result, seconds = outcome
    assert result == ("refused" if "{" in text else text)
    assert isinstance(seconds, float)
    assert seconds < 6


def test_long_conversations_fit() -> None:
    """The bounds grow with what the request brings."""
    messages = [{"role": "user", "content": "word " * 200_000}, {"role": "assistant", "content": "ok"}] * 5
    text = render("{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '</s>' }}{% endfor %}", messages)
    assert len(text) == 5 * (len("<user></s><assistant>ok</s>") + 999_999)
    many = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 1000
    assert template(source("Qwen-Qwen3-0.6B")).render(many).text.count("<|im_start|>") == 2001
