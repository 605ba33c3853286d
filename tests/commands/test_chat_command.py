"""`martlet chat`: what an answer may take of the context, and what happens when the conversation
fills it.
"""

from __future__ import annotations

import pytest

from martlet.commands.chat import Conversation
from martlet.toy import scripted_llm, spell

Captured = pytest.CaptureFixture[str]
GREEDY: dict[str, object] = {"temperature": 0.0}


def test_an_answer_without_end_leaves_room_for_the_next_message(capsys: Captured) -> None:
    """Context 64, a token a byte: "u:hi;a:" takes 7, the answer ends at 7/8 of 64."""
    with scripted_llm(lambda seq, number: ord("x")) as llm:
        talk = Conversation(llm, None, GREEDY)
        talk.handle("hi")
        assert capsys.readouterr().err.splitlines()[0] == "[stopped at the limit of 49 tokens, which -n sets]"
        assert talk.messages[1]["content"] == "x" * 49
        talk.handle("more")  # the first two messages and this one would take 70
        assert "[the model is not shown the oldest 2 messages: the context is full]" in capsys.readouterr().err
        assert talk.last is not None
        assert talk.last.prompt == "u:more;a:"
        assert len(talk.messages) == 4  # /save has them all
        talk.handle("/stats")
        assert "4 messages (2 not shown to the model)" in capsys.readouterr().err
        talk.handle("/reset")
        assert (talk.left_out, talk.messages) == (0, [])


def test_a_limit_that_was_set_is_the_limit(capsys: Captured) -> None:
    with scripted_llm(lambda seq, number: ord("x")) as llm:
        Conversation(llm, None, {**GREEDY, "max_tokens": 3}).handle("hi")
    found = capsys.readouterr()
    assert found.out == "xxx\n"
    assert "[stopped at the limit of 3 tokens, which -n sets]" in found.err


def test_the_system_message_stays_and_half_of_the_context_is_free(capsys: Captured) -> None:
    with scripted_llm(spell("ok")) as llm:
        talk = Conversation(llm, "S", GREEDY)
        prompts = []
        for _ in range(6):  # a turn takes "u:hi;" and "a:ok;", 10 tokens, and the system message 4
            talk.handle("hi")
            assert talk.last is not None
            prompts.append(talk.last.prompt)
    turn = "u:hi;a:ok;"
    # the fifth prompt would have 4 + 40 + 7 = 51 tokens, more than 48: turns go until it has at
    # most 32
    assert prompts == [f"s:S;{turn * n}u:hi;a:" for n in (0, 1, 2, 3, 2, 3)]
    assert capsys.readouterr().err.count("not shown") == 1


def test_a_message_too_long_for_the_context_is_refused_and_forgotten() -> None:
    with scripted_llm(spell("ok")) as llm:
        talk = Conversation(llm, None, GREEDY)
        with pytest.raises(Exception, match="context"):
            talk.handle("y" * 100)
        assert talk.messages == []
        talk.handle("hi")
        assert talk.messages[1]["content"] == "ok"
