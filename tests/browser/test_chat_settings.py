"""The chat page's settings in a real browser: what is sent, what is stored, response formats,
tokens and their chances, models.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from martlet.toy import spell
from tests.browser.chatting import Open, answered, ask, opened
from tests.browser.waiting import until
from tests.server.serving import Served, serving
from tests.server.test_server_models import Loader

pytestmark = pytest.mark.browser


def test_settings_are_sent_and_kept(open_page: Open, served: Served) -> None:
    page = opened(open_page, served)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Top k").fill("7")
    page.get_by_label("Seed").fill("42")
    page.get_by_label("Longest answer").fill("3")
    page.get_by_label("Stop at").fill("END")
    page.keyboard.press("Escape")
    ask(page, "hi")
    answered(page)
    body = page.asked[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ("temperature", "top_k", "seed", "max_tokens", "stop")} == {
        "temperature": 0, "top_k": 7, "seed": 42, "max_tokens": 3, "stop": ["END"]
    }  # fmt: skip
    assert {"top_p", "min_p", "response_format", "logprobs"}.isdisjoint(body)
    assert page.get_by_role("button", name="Continue").count() == 1  # it was cut
    page.reload()
    until(page, "document.title !== 'Martlet'")
    assert page.locator(".message").count() == 2
    assert page.locator("#set-top_k").input_value() == "7"
    page.get_by_role("button", name="New chat").click()
    page.reload()
    assert page.locator(".message").count() == 0


def test_a_wrong_setting_is_named_and_nothing_is_sent(open_page: Open, served: Served) -> None:
    page = opened(open_page, served)
    page.locator("#set-top_p").evaluate("input => (input.value = '7')")
    ask(page, "hi")
    assert "Top p" in answered(page).get_by_role("alert").inner_text()
    assert page.asked == []


def entry(text: bytes, probability: float, others: tuple[tuple[str, float], ...] = ()) -> dict[str, Any]:
    """A token as the API tells it."""
    top = [{"token": word, "logprob": math.log(share), "bytes": list(word.encode())} for word, share in others]
    token = text.decode("utf-8", "replace")
    return {"token": token, "logprob": math.log(probability), "bytes": list(text), "top_logprobs": top}


def test_tokens_are_coloured_and_explained(open_page: Open, served: Served) -> None:
    """Five levels of probability; a character of two tokens is one, as likely as both together."""
    entries = [
        entry(b"Sure", 0.95, (("Sure", 0.95), ("No", 0.04))),
        entry(b" so", 0.6),
        entry(b"\xc3", 0.5),
        entry(b"\xa9", 0.5),
        entry(b" rare", 0.1, (("common", 0.8),)),
        entry(b"!", 0.01),
    ]
    delta = {"content": "Sure so\u00e9 rare!"}
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": entries}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page = opened(open_page, served)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Colour tokens").check()
    page.keyboard.press("Escape")
    ask(page, "hi")
    tokens = answered(page).locator(".tokens .token")
    assert page.asked[0]["logprobs"] is True
    assert page.asked[0]["top_logprobs"] == 5
    found = tokens.evaluate_all("all => all.map(one => [one.textContent, one.className, one.title])")
    assert found == [
        ["Sure", "token p0", "95.0 %"],
        [" so", "token p1", "60.0 %"],
        ["\u00e9", "token p2", "25.0 %"],
        [" rare", "token p3", "10.0 %"],
        ["!", "token p4", "1.00 %"],
    ]
    tokens.nth(0).click()
    rows = page.locator(".token-details tr")
    assert rows.all_inner_texts() == ["Sure\t95.0 %\t", "No\t4.00 %\t"]
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert rows.all_inner_texts() == ["common\t80.0 %\t", "\u00b7rare\t10.0 %\t"]
    assert page.locator(".chosen").inner_text().startswith("\u00b7rare")
    page.get_by_role("button", name="As text").click()
    assert page.locator(".assistant > .text").inner_text() == "Sure so\u00e9 rare!"


@pytest.mark.parametrize("honoured", [[], ["json_object"], ["json_object", "json_schema"]], ids=["none", "one", "both"])
def test_forms_of_answers_are_offered_if_the_server_honours_them(
    open_page: Open, served: Served, honoured: list[str]
) -> None:
    def explain(route: Any) -> None:
        wanted = (route.request.post_data_json.get("response_format") or {}).get("type")
        fine = wanted is None or wanted in honoured
        reply = {"settings": {}} if fine else {"error": {"message": "not supported", "param": "response_format"}}
        route.fulfill(status=200 if fine else 400, json=reply)

    page = opened(open_page, served, "/engine")
    page.route("**/v1/explain", explain)
    page.goto(served.base + "/")
    until(page, "document.title !== 'Martlet'")
    page.get_by_role("button", name="Settings").click()
    page.wait_for_timeout(200)
    assert page.locator("#format").is_visible() == bool(honoured)
    offered = page.locator("#format option").evaluate_all("all => all.filter(o => !o.disabled).map(o => o.value)")
    assert offered == ["text", *honoured]
    if "json_schema" in honoured:
        page.get_by_label("Response format").select_option("json_schema")
        page.get_by_label("JSON Schema").fill('{"type": "array"}')
        page.keyboard.press("Escape")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "no"}}))
        ask(page, "hi")
        answered(page)
        form = page.asked[0]["response_format"]
        assert form["type"] == "json_schema"
        assert form["json_schema"]["schema"] == {"type": "array"}


def test_another_model_can_be_chosen(open_page: Open) -> None:
    """It is loaded when it is chosen, and answers from then on."""
    loader = Loader("other", set())
    with serving(spell("first"), more={"another": loader}) as served:
        page = opened(open_page, served)
        page.get_by_label("Model").select_option("another")
        until(page, "document.title.startsWith('another')")
        ask(page, "hi")
        assert answered(page).locator(".text").last.inner_text() == "other"
        assert loader.loads == 1
        assert page.asked[0]["model"] == "another"
        page.get_by_role("link", name="Engine").click()
        page.wait_for_selector("#models:visible")
        with page.expect_navigation():
            page.get_by_label("Model").select_option("another")
        until(page, "location.search === '?model=another' && document.querySelector('#numbers dd') !== null")
