"""The chat page in a real browser: what a user does, by mouse, by keyboard, on a phone, and what a
hostile answer cannot do.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from martlet.toy import spell
from tests.browser.chatting import HOSTILE, Open, answered, ask, opened
from tests.browser.waiting import until
from tests.server.serving import Served, serving, wait_until
from tests.server.test_server_models import Loader

pytestmark = pytest.mark.browser


def test_an_answer_is_markdown_and_never_markup(open_page: Open, served: Served) -> None:
    """Fault OPS-09."""
    page = opened(open_page, served)
    ask(page, "hi")
    text = answered(page).locator(".text").last
    assert text.locator("strong").inner_text() == "bold"
    assert text.locator("script, img, style").count() == 0
    assert page.evaluate("window.hit") is None
    assert text.locator("a").evaluate_all("all => all.map(a => [a.textContent, a.href, a.rel])") == [
        ["b", "https://example.org/", "noopener noreferrer nofollow"],
        ["image: c", "https://evil.example/c.png", "noopener noreferrer nofollow"],
    ]
    assert "<script>window.hit=1</script><img src=x onerror='window.hit=1'>" in text.inner_text()
    assert text.locator("figure pre").inner_text() == "<script>window.hit=1</script>"
    assert "tokens/s" in page.locator(".facts").last.inner_text()
    assert page.locator("#status").inner_text().startswith("Answered.")


def test_names_and_questions_are_no_markup_either(open_page: Open) -> None:
    """Fault OPS-09: the same as what a user writes, as a setting, as the model's name, as a prompt
    that the engine shows.
    """
    evil = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    with serving(spell(evil), model_name=evil, view_text=True, prefix_cache=True) as served:
        page = opened(open_page, served)
        page.locator("#system").evaluate("(box, evil) => (box.value = evil)", evil)
        ask(page, evil)
        assert answered(page).locator(".text").last.inner_text() == evil
        assert page.locator(".message.user .text").last.inner_text() == evil
        assert page.locator("#model").inner_text() == evil
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_role("button", name="Cancel").click()
        assert page.locator(".message img, .message script, #model img").count() == 0
        assert page.evaluate("window.hit") is None
        page.goto(served.base + "/engine")
        until(page, "document.querySelectorAll('#tree g').length > 0")
        assert "<img" in page.locator("#tree g").first.get_attribute("aria-label") + page.locator("#tree").inner_html()
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.hit") is None


def test_markup_is_refused_by_the_policy_too(open_page: Open, served: Served) -> None:
    """Should the page ever have a fault, the browser still stands before it."""
    page = opened(open_page, served)
    page.forgiven.append("")  # the violations that follow
    said = page.evaluate("(() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name } })()")
    assert said == "TypeError"
    page.evaluate("document.body.append(Object.assign(document.createElement('img'), {src: 'https://evil.example/'}))")
    failed = page.evaluate("fetch('https://evil.example/').then(() => 'sent', () => 'refused')")
    assert failed == "refused"


def test_keyboard_alone(open_page: Open, slow: Served) -> None:
    """Write, send, stop, edit, ask again; the box has two lines only if one wants them."""
    page = opened(open_page, slow)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.focus("#input")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.assistant > .text')?.textContent.includes('word')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert "stopped" in page.locator(".facts").last.inner_text()
    wait_until(lambda: not slow.service.bridge.open_tickets)
    assert page.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    page.focus("#input")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.value") == "one\ntwo"
    page.keyboard.press("End")
    page.keyboard.type("!")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#stop:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert page.asked[1]["messages"] == [{"role": "user", "content": "one\ntwo!"}]
    assert page.locator(".message").count() == 2


def test_stop_then_continue_then_regenerate(open_page: Open, slow: Served) -> None:
    page = opened(open_page, slow)
    ask(page, "go")
    until(page, "document.querySelector('.assistant > .text')?.textContent.length > 12")
    page.click("#stop")
    begun = answered(page).locator(".text").last.inner_text()
    assert 10 < len(begun) < 300
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("#stop:visible")
    page.wait_for_timeout(500)
    page.click("#stop")
    answered(page)
    body = page.asked[1]
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    assert body["messages"][-1]["role"] == "assistant"
    assert begun.startswith(body["messages"][-1]["content"].strip()[:10])
    assert len(page.locator(".assistant > .text").last.inner_text()) > len(begun)
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector("#stop:visible")
    page.click("#stop")
    answered(page)
    assert [message["role"] for message in page.asked[2]["messages"]] == ["user"]


def test_a_new_chat_ends_the_answer_of_the_old_one(open_page: Open, slow: Served) -> None:
    page = opened(open_page, slow)
    ask(page, "go")
    until(page, "document.querySelector('.assistant > .text')?.textContent.length > 5")
    page.get_by_role("button", name="New chat").click()
    page.wait_for_selector("#send:visible")
    wait_until(lambda: not slow.service.bridge.open_tickets)
    assert page.locator(".message").count() == 0
    ask(page, "again")
    page.wait_for_selector("#stop:visible")
    assert page.asked[1]["messages"] == [{"role": "user", "content": "again"}]


def test_an_error_is_shown_and_the_next_question_answered(open_page: Open) -> None:
    with serving(spell("fine"), context=64) as served:
        page = opened(open_page, served)
        ask(page, "much too long " * 20)
        assert "context" in answered(page).get_by_role("alert").inner_text()
        ask(page, "short")
        assert answered(page).locator(".text").last.inner_text() == ""
        # both questions, as one
        assert [message["role"] for message in page.asked[1]["messages"]] == ["user"]
        page.get_by_role("button", name="New chat").click()
        served.executor.fail = lambda plan: True
        page.forgiven.append("500")
        ask(page, "hi")
        assert "caught fire" in answered(page).get_by_role("alert").inner_text()
        served.executor.fail = lambda plan: False
        page.get_by_role("button", name="Regenerate").click()
        until(page, "document.querySelector('.assistant > .text')?.textContent === 'fine'")


def test_a_key_is_asked_for_and_kept_for_the_tab(open_page: Open) -> None:
    with serving(spell("fine"), api_keys=("right-key",)) as served:
        page = open_page(served.base + "/")
        page.forgiven += ["401 (Unauthorized)", "400 (Bad Request)"]
        page.get_by_label("This server wants a key").fill("wrong-key")
        page.keyboard.press("Enter")
        page.get_by_label("This key was refused").fill("right-key")
        page.keyboard.press("Enter")
        until(page, "document.title !== 'Martlet'")
        ask(page, "hi")
        assert answered(page).locator(".text").last.inner_text() == "fine"
        assert "right-key" not in page.evaluate("JSON.stringify({...localStorage})")
        page.goto(served.base + "/engine")
        until(page, "document.querySelector('#model').textContent === 'scripted'")


@pytest.mark.parametrize("several", [False, True], ids=["one model", "several models"])
def test_on_a_phone_nothing_is_out_of_reach(open_page: Open, several: bool) -> None:
    more = {"another-model-with-a-name": Loader("other", set())} if several else {}
    with serving(spell(HOSTILE), context=2048, more=dict(more)) as served:
        check_phone(open_page, served)


def check_phone(open_page: Open, served: Served) -> None:
    phone = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
    page = opened(open_page, served, **phone)
    ask(page, "hi")
    answered(page)
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        box = page.locator("#send").bounding_box()
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
        boxes = [button.bounding_box() for button in page.locator("header :is(button, .button)").all()]
        assert all(box and box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["height"] >= 32 for box in boxes)
        page.get_by_role("button", name="Settings").tap()
        last = page.get_by_role("button", name="Save conversation")
        last.scroll_into_view_if_needed()
        assert last.is_visible()
        page.get_by_role("button", name="Close").tap()
        page.reload()


@pytest.mark.parametrize("path", ["/", "/engine"])
def test_light_and_dark(open_page: Open, served: Served, path: str) -> None:
    """The system decides until the button does."""
    light = "getComputedStyle(document.body).backgroundColor"
    bright = {}
    for scheme in ("light", "dark"):
        page = opened(open_page, served, path, color_scheme=scheme)
        bright[scheme] = page.evaluate(light)
    assert bright == {"light": "rgb(247, 247, 244)", "dark": "rgb(20, 23, 28)"}
    button = page.locator("#theme")
    button.click()
    assert page.evaluate(light) == bright["light"]
    button.click()
    assert page.evaluate(light) == bright["dark"]
    page.reload()
    assert page.evaluate(light) == bright["dark"]
    assert button.get_attribute("aria-label") == "Colours: dark"


@pytest.mark.parametrize("path", ["/", "/engine"])
def test_everything_has_a_name(open_page: Open, served: Served, path: str) -> None:
    """What a screen reader says of each control: its text, its label or its aria-label."""
    page = opened(open_page, served, path)
    if path == "/":
        ask(page, "hi")
        answered(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, a, input, textarea, select, canvas, [role=group]')].filter((e) =>
             !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.locator("h1, h2, h3, h4, h5, h6").evaluate_all("all => all.map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))


@pytest.mark.parametrize(
    ("lines", "said", "failed"),
    [
        ([{"reasoning_content": "hm"}, {"content": "yes"}, "stop", "[DONE]"], "yes", None),
        ([{"content": "half"}, {"error": {"message": "the engine is gone"}}], "half", "the engine is gone"),
        ([{"content": "half"}], "half", "The stream ended before the answer did."),
        (["not json"], "", "JSON"),
    ],
    ids=["reasoning", "error in the stream", "cut off", "nonsense"],
)
def test_what_a_stream_may_bring(
    open_page: Open, served: Served, lines: list[Any], said: str, failed: str | None
) -> None:
    def data(line: Any) -> str:
        if line in ("[DONE]", "not json"):
            return str(line)
        if line == "stop":
            return json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        return json.dumps(
            line if "error" in line else {"choices": [{"index": 0, "delta": line, "finish_reason": None}]}
        )

    body = "".join(f"data: {data(line)}\n\n" for line in lines)
    page = opened(open_page, served)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, "hi")
    answer = answered(page)
    assert answer.locator("> .text").inner_text() == said
    assert (failed is None) == (answer.get_by_role("alert").count() == 0)
    if failed is not None:
        assert failed in answer.get_by_role("alert").inner_text()
    else:
        assert answer.locator("details").get_attribute("open") is None
        answer.locator("summary").click()
        assert answer.locator("details .text").inner_text() == "hm"


def test_a_conversation_can_be_saved(open_page: Open, served: Served) -> None:
    page = opened(open_page, served)
    ask(page, "hi")
    answered(page)
    page.get_by_role("button", name="Settings").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save conversation").click()
    saved = json.loads(download.value.path().read_text())
    assert saved["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": HOSTILE}]
