"""Markdown as the chat page shows it: examples of CommonMark 0.31.2 by hand, and text made to be
slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from martlet.toy import spell
from tests.server.serving import serving

pytestmark = pytest.mark.browser
LINK = 'title="{0}" target="_blank" rel="noopener noreferrer nofollow"'
SHOW = """async ([text, before]) => {
  const { show } = await import('/static/markdown.js');
  const target = document.createElement('div');
  if (before !== null) show(target, before);
  const start = performance.now();
  show(target, text);
  return [target.innerHTML, performance.now() - start];
}"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    with serving(spell("abc")) as served:
        page = browser.new_page()
        page.goto(served.base + "/")
        yield page
        page.close()


def shown(page: Any, text: str, before: str | None = None) -> str:
    return str(page.evaluate(SHOW, [text, before])[0])


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** ***d***", "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em></p>"),
        ("snake_case_name and _so_", "<p>snake_case_name and <em>so</em></p>"),
        ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
        ("**open and *closed*", "<p>**open and <em>closed</em></p>"),
        ("~~gone~~ ~kept~", "<p><del>gone</del> ~kept~</p>"),
        ("`a*b*` and ``c`d``", "<p><code>a*b*</code> and <code>c`d</code></p>"),
        ("`open", "<p>`open</p>"),
        (r"\*not\* \\ \a", r"<p>*not* \ \a</p>"),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("a < b & c > d", "<p>a &lt; b &amp; c &gt; d</p>"),
        ("&lt;", "<p>&amp;lt;</p>"),
        ("# A #\n## B *c*", "<h3>A</h3><h4>B <em>c</em></h4>"),
        ("#no", "<p>#no</p>"),
        ("---", "<hr>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
        ("- a\n+ b", "<ul><li>a</li></ul><ul><li>b</li></ul>"),
        ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
        ("It was in\n1984. Then", "<p>It was in<br>1984. Then</p>"),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("| a | b |\n|---|--:|\n| 1 | `x\\|y` |",
         '<div class="wide" tabindex="0" role="group" aria-label="table"><table><thead><tr><th scope="col">a</th>'
         '<th class="right" scope="col">b</th></tr></thead><tbody><tr><td>1</td><td class="right"><code>x|y</code></td></tr>'
         "</tbody></table></div>"),
        ("a | b", "<p>a | b</p>"),
        ("[x](https://a.b/c)", f'<p><a href="https://a.b/c" {LINK.format("https://a.b/c")}>x</a></p>'),
        ("<https://a.b/c>", f'<p><a href="https://a.b/c" {LINK.format("https://a.b/c")}>https://a.b/c</a></p>'),
        ("see https://a.b/c_d_e.", f'<p>see <a href="https://a.b/c_d_e" {LINK.format("https://a.b/c_d_e")}>https://a.b/c_d_e</a>.</p>'),
        ("[x](javascript:alert(1))", "<p>x (javascript:alert(1))</p>"),
        ("[x](data:text/html,y) [z](/v1/models)", "<p>x (data:text/html,y) z (/v1/models)</p>"),
        ("[x](JaVaScRiPt:1) [y](\tjavascript:1)", "<p>x (JaVaScRiPt:1) y (javascript:1)</p>"),
        ("<b onclick=x>y</b>", "<p>&lt;b onclick=x&gt;y&lt;/b&gt;</p>"),
        ("[x]", "<p>[x]</p>"),
        ("", ""),
    ],
)  # fmt: skip
def test_markdown(page: Any, text: str, html: str) -> None:
    assert shown(page, text) == html


def test_code_is_kept_as_it_is(page: Any) -> None:
    html = shown(page, "```py\nif a < b:\n    *x*\n```\nafter")
    assert "<pre" in html
    assert "<code>if a &lt; b:\n    *x*</code>" in html
    assert "<span>py</span>" in html
    assert html.endswith("</figure><p>after</p>")
    # it still grows, and another fence is none
    assert "<code>x\n~~~</code>" in shown(page, "```\nx\n~~~")


def test_what_has_not_changed_stays(page: Any) -> None:
    """A selection in an answer that still grows would be lost otherwise."""
    kept = page.evaluate(
        """async () => {
          const { show } = await import('/static/markdown.js');
          const target = document.createElement('div');
          show(target, '# a\\n\\nb\\n\\nc');
          const before = [...target.children];
          show(target, '# a\\n\\nb\\n\\nc d\\n\\n- e');
          return [...target.children].map((node, place) => node === before[place]);
        }"""
    )
    assert kept == [True, True, False, False]
    for end in range(1, 40):
        text = "# a\n\n- b\n  - c\n\n| x |\n|---|\n| y |\n\nd"[:end]
        assert shown(page, text, text[: end - 1]) == shown(page, text)


@pytest.mark.parametrize(
    "text",
    ["*" * 50_000, "*a " * 20_000, "_a" * 20_000 + "*b**" * 10_000, "[" * 50_000, "[](" * 20_000, "`" * 50_000,
     "".join("`" * n + " " for n in range(1, 400)), "> " * 5_000, "- " * 5_000, "  - a\n" * 5_000, "|a" * 20_000 + "\n" + "|-" * 20_000,
     "https://" * 10_000, "<a:" * 20_000, "\\" * 50_000, "![" * 20_000 + "](", "((" * 2_000 + "[a](" + "(" * 5_000, "1. " * 3_000,
     "a\n" * 20_000, "~" * 50_000, "[a](" + " " * 50_000],
    ids=lambda text: text[:8].strip().replace("\n", " "),
)  # fmt: skip
def test_hostile_text_is_shown_in_time(page: Any, text: str) -> None:
    html, took_ms = page.evaluate(SHOW, [text, None])
    assert len(html) > 0
    assert took_ms < 3000


def test_numbers_and_durations(page: Any) -> None:
    said: Callable[[str], Any] = lambda what: page.evaluate(  # noqa: E731
        f"import('/static/dom.js').then(({{ number, duration }}) => [{what}])"
    )
    assert said("number(1234567), number(0.5, 1), duration(0.0042), duration(0.042), duration(0.42), duration(42)") == [
        "1,234,567", "0.5", "4.2 ms", "42 ms", "0.42 s", "42 s"
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_events_may_be_cut_anywhere(page: Any, cut: int) -> None:
    """Format: https://html.spec.whatwg.org/multipage/server-sent-events.html; the é has two
    bytes.
    """
    body = (
        ': hello\n\ndata: {"a":"é"}\n\nevent: b\r\ndata: 1\r\ndata: 2\r\n\r\ndata: "x"\n\ndata: [DONE]\n\ndata: 9\n\n'
    )
    body = body.replace("data: 1\r\ndata: 2", "data: [1,\r\ndata: 2]")
    found = page.evaluate(
        """async ([body, cut]) => {
          const bytes = new TextEncoder().encode(body);
          const { stream } = await import('/static/api.js');
          const real = window.fetch;
          window.fetch = async () => new Response(new ReadableStream({ start(control) {
            for (let at = 0; at < bytes.length; at += cut) control.enqueue(bytes.slice(at, at + cut));
            control.close();
          } }));
          const found = [];
          for await (const event of stream('/x', {})) found.push([event.name, event.data]);
          window.fetch = real;
          return found;
        }""",
        [body, cut],
    )
    assert found == [["message", {"a": "é"}], ["b", [1, 2]], ["message", "x"]]
