"""gpt-oss's channels over HTTP: reasoning, an answer and calls, whole and streamed."""

from __future__ import annotations

from martlet.toy import spell
from tests.server.serving import events, serving

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}<|start|>assistant{# <|channel|> #}"
)
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is blue.<|return|>"
CALL = (
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.sky "
    '<|constrain|>json<|message|>{"when": "now"}<|call|>'
)
TOOL = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}


def test_an_answer_and_its_reasoning() -> None:
    with serving(spell(ANSWER), template=TEMPLATE, context=1024) as served:
        message = served.chat(max_tokens=200).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "It is blue.")
        deltas = [event["choices"][0]["delta"] for event in events(served.chat(max_tokens=200, stream=True))]
        assert "".join(delta.get("content") or "" for delta in deltas) == "It is blue."
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."


def test_a_call() -> None:
    with serving(spell(CALL), template=TEMPLATE, context=1024) as served:
        choice = served.chat(max_tokens=200, tools=[TOOL]).json()["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("sky", '{"when": "now"}')
        assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "Look.")
        response = served.chat(tools=[TOOL], tool_choice="required")
        assert response.status_code == 400
        assert "formats that can be enforced" in response.json()["error"]["message"]
