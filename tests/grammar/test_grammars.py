"""GBNF and Lark on the automaton with a stack: against a slow reference that tries everything, Lark
itself, and by hand.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.errors import RequestError
from martlet.grammar.gbnf import gbnf_rules
from martlet.grammar.lark import lark_rules
from martlet.grammar.matcher import Grammar
from martlet.grammar.pushdown import grammar_state
from martlet.grammar.regex_parse import Chars, Choice, Repeat, Row
from martlet.grammar.rules import Ref, Rule
from martlet.grammar.states import State
from martlet.grammar.vocabulary import Vocabulary

DATA = Path(__file__).resolve().parents[1] / "data" / "gbnf"


def gbnf(text: str) -> State:
    return grammar_state(gbnf_rules(text))


def lark(text: str) -> State:
    return grammar_state(*lark_rules(text))


def accepts(state: State | None, text: str) -> bool:
    for byte in text.encode():
        if state is None:
            return False
        state = state.step(byte)
    return state is not None and state.accepts


# -- the reference: all ends that a rule's text can have, by fixpoint over (rule, start) -----------
def reference(rules: dict[str, Rule], root: str, text: str) -> bool:
    ends: dict[tuple[str, int], set[int]] = {(name, at): set() for name in rules for at in range(len(text) + 1)}

    def of(rule: Rule, at: int) -> set[int]:
        if isinstance(rule, Ref):
            return ends[rule.name, at]
        if isinstance(rule, Chars):
            here = at < len(text) and any(first <= ord(text[at]) <= last for first, last in rule.ranges)
            return {at + 1} if here else set()
        if isinstance(rule, Choice):
            return set().union(*(of(option, at) for option in rule.options))
        if isinstance(rule, Row):
            reached = {at}
            for item in rule.items:
                reached = set().union(*(of(item, here) for here in reached))
            return reached
        assert isinstance(rule, Repeat)
        reached, last = ({at} if rule.low == 0 else set()), {at}
        for n in range(1, (rule.high or len(text) + rule.low + 1) + 1):
            last = set().union(*(of(rule.item, here) for here in last))
            if n >= rule.low:
                if last <= reached:
                    break
                reached |= last
        return reached

    changed = True
    while changed:
        changed = False
        for (name, at), known in ends.items():
            more = of(rules[name], at) - known
            known |= more
            changed = changed or bool(more)
    return len(text) in ends[root, 0]


RULES = st.recursive(
    st.sampled_from(['"a"', '"b"', '"ab"', "[ab]", "[^a]", "root", "x", "y", '""']),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(" ".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} | {pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(RULES, RULES, RULES)
def test_random_grammars_agree_with_the_reference(root: str, x: str, y: str) -> None:
    text = f"root ::= {root}\nx ::= {x}\ny ::= {y}\n"
    rules = gbnf_rules(text)
    try:
        state = gbnf(text)
    except RequestError:  # no text at all, or left recursion behind what may be empty: then nothing may be generated
        return
    draw = random.Random(text)
    for _ in range(12):
        sample = "".join(draw.choice("abc") for _ in range(draw.randrange(6)))
        assert accepts(state, sample) == reference(rules, "root", sample), (text, sample)


@settings(max_examples=60, deadline=None)
@given(RULES, RULES, RULES, st.integers(0, 2**32))
def test_no_dead_ends(root: str, x: str, y: str, seed: int) -> None:
    """From every state something goes on, or the text may end.

    And a short way to an end is always there.
    """
    try:
        state: State | None = gbnf(f"root ::= {root}\nx ::= {x}\ny ::= {y}\n")
    except RequestError:
        return
    draw = random.Random(seed)
    for _ in range(30):
        assert state is not None
        following = state.next_bytes()
        assert following is not None
        assert following or state.accepts
        assert all(state.step(byte) is not None for byte in following)
        if not following:
            break
        state = state.step(draw.choice(following))


# -- llama.cpp's own grammars, unchanged -----------------------------------------------------------
LLAMA_CPP = {
    "arithmetic": (["a = 1\n", "(a+b)*2 = c\nx=1\n"], ["(a = 1\n", "a = 1"]),
    "c": (
        ["int main(){return 0;}", "int f(int x){if(x<1){return  1;}else{x = f(x-1);}}", "int f(){//é\n}"],
        ["int main({}", "f(){}"],
    ),
    "chess": (["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O-O+ exd8=Q#\n9. a1 a1\n"], ["1. e4 e5\n", "1. e9 e5\n2. a1 a1\n"]),
    "english": (["Well, it's fine."], ["two  spaces", "é", ""]),
    "japanese": (["こんにちは 世界、"], ["hello", ""]),
    "json": (['{"a": [1, true, {"b":null}] }', "{}"], ["[1]", '{"a":}', '{"a":1']),
    "json_arr": (["[\n1]", '[\n{"a":"b"},\n2]'], ["[1]", "{}"]),
    "list": (["- é\n- b\n"], ["- a", "a\n", "- \u2028\n"]),
}


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_grammars_of_llama_cpp(name: str) -> None:
    state = gbnf((DATA / f"{name}.gbnf").read_text(encoding="utf-8"))
    inside, outside = LLAMA_CPP[name]
    assert [text for text in inside if not accepts(state, text)] == []
    assert [text for text in outside if accepts(state, text)] == []


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),  # fault STR-21
        # fault STR-21
        ('root ::= e\ne ::= n | e "+" e\nn ::= [0-9]+', ["1", "1+1", "1+22+3"], ["1+", "+1"]),
        ('root ::= a "x" | "y"\na ::= root "z"', ["y", "yzxzx"], ["yz"]),
        ('root ::= "a" root "b" | ""', ["", "ab", "aabb"], ["aab"]),
        ("root ::= [😀-🙏]+", ["😀", "🙏😁"], ["🙐", ""]),  # fault STR-29
        ('root ::= "é"', ["é"], ["e"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\n\\"" [\\]\\-a]', ['Aé😀\n"]', 'Aé😀\n"-'], ["A"]),
        ('root ::=\n  # comment\n  "a" |\n  ("b"\n "c")', ["a", "bc"], ["b"]),
        ("root ::= .{2,3}", ["é\n", "😀ab"], ["a", "abcd"]),
        ("root ::= s\ns ::= s s | [ab]", ["a", "abab"], [""]),  # ambiguous
    ],
)
def test_gbnf(text: str, inside: list[str], outside: list[str]) -> None:
    state = gbnf(text)
    assert [sample for sample in inside if not accepts(state, sample)] == []
    assert [sample for sample in outside if accepts(state, sample)] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('root ::= "a', "line 1"),
        ('start ::= "a"', "'root'"),
        ("root ::= x", "'x'"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("root ::= *", "nothing to repeat"),
        ("root ::= [z-a]", "range"),
        ('root ::= "\\q"', "escape"),
        ("root ::= <think>", "tokens"),
        ("root ::= root", "leads to itself"),
        ('root ::= "a" x\nx ::= "b" x', "no text"),
        ("root ::= x\nx ::= root", "leads to itself"),
        ('root ::= x? root "a" | "b"\nx ::= "c"', "leads to itself"),
        ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "groups"),  # fault STR-23
        ('root ::= "a"{100000}', "repetitions"),
        ('root ::= (("a" root? "b"){1000}){1000}', "too large"),
    ],
)
def test_gbnf_refuses_by_name(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        gbnf(text)


SUMS = """
    ?start: sum
    ?sum: product | sum "+" product -> add | sum "-" product   // comment
    ?product: atom | product "*" atom
    ?atom: NUMBER | "-" atom | NAME | "(" sum ")" | "sin"i "(" sum ")"
    %import common.CNAME -> NAME
    %import common.NUMBER
    %import common.WS_INLINE
    %ignore WS_INLINE
"""


@pytest.mark.parametrize("text", ["", "   ", "\n\n", "// nothing\n"])
def test_an_empty_grammar_says_so(text: str) -> None:
    with pytest.raises(RequestError, match="grammar is empty"):
        lark(text)


def test_lark() -> None:
    state = lark(SUMS)
    for text in ("1+2", " a * ( b - 3.5e3 ) + -1", "SIN(x)", "x"):
        assert accepts(state, text), text
    for text in ("1 +", "1 2", "", "(a"):
        assert not accepts(state, text), text
    assert not accepts(state, "1" + " " * 40 + "+2")  # white space comes to an end


def test_lark_agrees_with_lark() -> None:
    oracle = pytest.importorskip("lark")
    parser, state = oracle.Lark(SUMS, parser="earley"), lark(SUMS)
    draw = random.Random(5)
    for _ in range(150):
        text = "".join(
            draw.choice(["1", "a", "+", "-", "*", "(", ")", " ", "2.5"]) for _ in range(draw.randrange(1, 7))
        )
        try:
            parser.parse(text)
            expected = True
        except oracle.exceptions.LarkError:
            expected = False
        assert accepts(state, text) == expected, text


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ('start: "a"~2..3 B?\nB: "x".."z" | /[0-9]+/i', ["aa", "aaa12", "aaz"], ["a", "aaaa", "aaw"]),
        ('start: ["a"] ("b" | "c")+', ["b", "abc"], ["a"]),
        ('start: x\n  | y\nx: /é+/\ny: "\\n"', ["é", "éé", "\n"], ["e"]),
        ('start: A A\nA.2: "q"i', ["qQ"], ["q"]),
    ],
)
def test_lark_forms(text: str, inside: list[str], outside: list[str]) -> None:
    state = lark(text)
    assert [sample for sample in inside if not accepts(state, sample)] == []
    assert [sample for sample in outside if accepts(state, sample)] == []


@pytest.mark.parametrize(
    "text",
    [
        "start: x",
        'a: "b"',
        'start: "a',
        "%declare A",
        "start: _sep{x}\n",
        "%import python.NAME\nstart: NAME",
        "start: A\nA: A",
    ],
)
def test_lark_refuses(text: str) -> None:
    with pytest.raises(RequestError):
        lark(text)


@pytest.mark.parametrize("name", ["json", "arithmetic", "c"])
def test_masks_are_what_steps_allow(name: str) -> None:
    state = gbnf((DATA / f"{name}.gbnf").read_text(encoding="utf-8"))
    texts = [bytes((b,)) for b in range(256)]
    texts += [
        b'{"',
        b'":',
        b'"}',
        b"int ",
        b" = ",
        b"return 0;}",
        b"){",
        b'": [',
        b"}}",
        b"true,",
        b"//",
        b" 1\n",
        "é".encode(),
        b"ab",
    ]
    vocabulary = Vocabulary([*texts, None], [len(texts)])
    grammar = Grammar(state, vocabulary)
    matcher = grammar.matcher()
    draw = random.Random(name)
    bits = __import__("numpy").zeros(vocabulary.n_words, "uint32")
    for _ in range(60):
        matcher.mask(bits)
        allowed = [t for t in range(len(texts) + 1) if bits[t >> 5] >> (t & 31) & 1]
        assert allowed == [t for t in range(len(texts) + 1) if matcher.allows(t)]
        assert allowed
        token = draw.choice(allowed)
        if token == len(texts):
            break
        assert matcher.advance(token)


@pytest.mark.parametrize("last", ['"a"', '""', '"b" | ""'])
def test_long_chains_of_rules_take_no_time(last: str) -> None:
    """Work that grew with the square of their number took 15 s."""
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(5000)).replace("r0 ", "root ", 1)
    start = time.thread_time()
    state = grammar_state(gbnf_rules(f"{rules}\nr5000 ::= {last}"))
    assert time.thread_time() - start < 5.0
    assert state.accepts == (last != '"a"')
