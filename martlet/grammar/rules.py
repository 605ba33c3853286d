"""Rules of a context-free grammar, as the GBNF and Lark front ends make them, simplified.

A rule's body is a tree of `regex_parse.py`'s nodes, with `Ref` for another rule. Whatever needs no
recursion is made regular first: direct recursion at a rule's start or end becomes a loop, and rules
without recursion are inlined. Only the rest needs a stack. Read `network.py` next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from martlet.errors import RequestError
from martlet.grammar.codepoints import fold_case, unite
from martlet.grammar.regex_parse import Chars, Choice, Node, Repeat, Row

_MOST_SIZE = 4000  # of a rule that is written out where it is used
_MOST_ALTERNATIVES = 2000


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to another rule."""

    name: str


Rule = Node | Ref
NOTHING = Row(())


def literal(text: str, *, ignores_case: bool = False) -> Rule:
    """A text as it is, or in any case."""
    sets = [unite(((ord(c), ord(c)),)) for c in text]
    return flat([Chars(fold_case(ranges) if ignores_case else ranges) for ranges in sets])


def flat(items: list[Rule]) -> Rule:
    """Rules one after another, nested rows joined."""
    joined: list[Rule] = []
    for item in items:
        joined += item.items if isinstance(item, Row) else [item]
    return joined[0] if len(joined) == 1 else Row(tuple(joined))  # type: ignore[arg-type]


def options(rule: Rule) -> list[Rule]:
    """A rule's alternatives, nested alternatives included.

    An optional rule has the empty alternative.
    """
    if isinstance(rule, Choice):
        return [inner for option in rule.options for inner in options(option)]
    if isinstance(rule, Repeat) and (rule.low, rule.high) == (0, 1):
        return [*options(rule.item), NOTHING]
    return [rule]


def choice(alternatives: list[Rule]) -> Rule:
    unique = list(dict.fromkeys(alternatives))
    return unique[0] if len(unique) == 1 else Choice(tuple(unique))  # type: ignore[arg-type]


def children(rule: Rule) -> tuple[Rule, ...]:
    """The rules that a rule is made of."""
    if isinstance(rule, Row):
        return rule.items
    if isinstance(rule, Choice):
        return rule.options
    return (rule.item,) if isinstance(rule, Repeat) else ()


def refs(rule: Rule) -> set[str]:
    """Names of the rules that a rule refers to."""
    names: set[str] = set()
    ahead = [rule]
    while ahead:
        node = ahead.pop()
        if isinstance(node, Ref):
            names.add(node.name)
        ahead += children(node)
    return names


def replaced(rule: Rule, change: Callable[[Ref], Rule]) -> Rule:
    """The rule with every reference changed."""
    if isinstance(rule, Ref):
        return change(rule)
    if isinstance(rule, Row):
        return flat([replaced(item, change) for item in rule.items])
    if isinstance(rule, Choice):
        return choice([replaced(item, change) for item in rule.options])
    if isinstance(rule, Repeat):
        return Repeat(replaced(rule.item, change), rule.low, rule.high)  # type: ignore[arg-type]
    return rule


def size(rule: Rule) -> int:
    """Number of nodes in a rule, repetitions counted once."""
    total, ahead = 0, [rule]
    while ahead:
        node = ahead.pop()
        total += 1
        ahead += children(node)
    return total


def simplified(rules: Mapping[str, Rule], root: str) -> dict[str, Rule]:
    """Return the rules that the root needs, without left recursion and with little recursion.

    RequestError for a missing rule, or for left recursion that cannot be removed.
    """
    if root not in rules:
        raise RequestError(f"The grammar has no rule {root!r}, with which it begins.", code="invalid_grammar")
    kept = _reachable(rules, root)
    kept = {name: _looped(name, rule) for name, rule in kept.items()}
    kept = _without_left_recursion(kept)
    kept = _written_out(kept, root)
    return _reachable(kept, root)


def _reachable(rules: Mapping[str, Rule], root: str) -> dict[str, Rule]:
    reached: dict[str, Rule] = {}
    ahead = [root]
    while ahead:
        name = ahead.pop()
        if name in reached:
            continue
        if name not in rules:
            raise RequestError(f"The grammar uses the rule {name!r}, which it does not have.", code="invalid_grammar")
        reached[name] = rules[name]
        ahead += sorted(refs(rules[name]), reverse=True)
    return reached


def _looped(name: str, rule: Rule) -> Rule:
    """A rule with direct recursion at its start or end, as a loop.

    a → a x | y is y x*;  a → x a | y is x* y;  and a → a x a | y is y (x y)*, for what lies between
    two x is always a y.
    """
    rows = [_items(option) for option in options(rule)]
    this = Ref(name)
    if not any(row and (row[0] == this or row[-1] == this) for row in rows):
        return rule
    rows = [row for row in rows if row != [this]]  # a → a says nothing
    left = [row for row in rows if row and row[0] == this]
    right = [row for row in rows if row and row[-1] == this and row[0] != this]
    base = [flat(row) for row in rows if row not in left and row not in right]
    if not base:
        return rule
    if left and not right:
        start = choice(base)
        tails = [flat([*row[1:-1], start]) if len(row) > 2 and row[-1] == this else flat(row[1:]) for row in left]
        return flat([start, Repeat(choice(tails), 0, None)])  # type: ignore[arg-type]
    if right and not left:
        heads = [flat(row[:-1]) for row in right]
        return flat([Repeat(choice(heads), 0, None), choice(base)])  # type: ignore[arg-type]
    return rule


def _items(rule: Rule) -> list[Rule]:
    return list(rule.items) if isinstance(rule, Row) else [rule]


# -- left recursion --------------------------------------------------------------------------------
def _without_left_recursion(rules: dict[str, Rule]) -> dict[str, Rule]:
    """Paull's algorithm on left cycles: expand references to earlier rules at the start."""
    empty = _nullable(rules)
    leads = {name: _first_refs(rule, empty) for name, rule in rules.items()}
    cyclic = _on_cycles(leads)
    grown = dict(rules)
    for number, name in enumerate(cyclic):
        for earlier in cyclic[:number]:
            expanded: list[Rule] = []
            for option in options(grown[name]):
                row = _items(option)
                if row and row[0] == Ref(earlier):
                    expanded += [flat([*_items(start), *row[1:]]) for start in options(grown[earlier])]
                else:
                    expanded.append(option)
            if len(expanded) > _MOST_ALTERNATIVES:
                raise _left(name)
            grown[name] = choice(expanded)
        grown[name] = _looped(name, grown[name])
    empty = _nullable(grown)
    leads = {name: _first_refs(rule, empty) for name, rule in grown.items()}
    for name in _on_cycles(leads):
        raise _left(name)
    return grown


def _left(name: str) -> RequestError:
    return RequestError(
        f"The grammar's rule {name!r} leads to itself without taking any text, in a way that cannot be removed: write it as"
        " a repetition.",
        code="invalid_grammar",
    )


def _on_cycles(leads: Mapping[str, set[str]]) -> list[str]:
    """The names on a cycle of references, after removing names that lead to none."""
    used_by = _users(leads)
    left = {name: len(others) for name, others in leads.items()}
    ahead = [name for name, count in left.items() if not count]
    while ahead:
        for user in used_by[ahead.pop()]:
            left[user] -= 1
            if not left[user]:
                ahead.append(user)
    inner = {name: {other for other in leads[name] if left[other]} for name, count in left.items() if count}
    return [name for name in inner if _reaches(inner, name, name)]


def _users(leads: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """For each name, the names that lead to it."""
    users: dict[str, list[str]] = {name: [] for name in leads}
    for name, others in leads.items():
        for other in others:
            users[other].append(name)
    return users


def _reaches(leads: Mapping[str, set[str]], start: str, goal: str) -> bool:
    seen: set[str] = set()
    ahead = list(leads[start])
    while ahead:
        name = ahead.pop()
        if name == goal:
            return True
        if name not in seen:
            seen.add(name)
            ahead += leads[name]
    return False


def _nullable(rules: Mapping[str, Rule]) -> set[str]:
    """Rules that may match the empty text."""
    used_by = _users({name: refs(rule) for name, rule in rules.items()})
    nullable: set[str] = set()
    ahead = list(rules)
    while ahead:
        name = ahead.pop()
        if name not in nullable and _may_be_empty(rules[name], nullable):
            nullable.add(name)
            ahead += used_by[name]
    return nullable


def _may_be_empty(rule: Rule, known: set[str]) -> bool:
    if isinstance(rule, Ref):
        return rule.name in known
    if isinstance(rule, Row):
        return all(_may_be_empty(item, known) for item in rule.items)
    if isinstance(rule, Choice):
        return any(_may_be_empty(item, known) for item in rule.options)
    if isinstance(rule, Repeat):
        return rule.low == 0 or _may_be_empty(rule.item, known)
    return not isinstance(rule, Chars)


def _first_refs(rule: Rule, empty: set[str]) -> set[str]:
    """The rules with which a rule may begin."""
    if isinstance(rule, Ref):
        return {rule.name}
    if isinstance(rule, Row):
        names: set[str] = set()
        for item in rule.items:
            names |= _first_refs(item, empty)
            if not _may_be_empty(item, empty):
                break
        return names
    return set().union(*(_first_refs(item, empty) for item in children(rule)))


# -- what needs no stack ---------------------------------------------------------------------------
def _written_out(rules: dict[str, Rule], root: str) -> dict[str, Rule]:
    """Inline rules without references until nothing changes; large rules stay."""
    kept = dict(rules)
    used_by = _users({name: refs(rule) for name, rule in rules.items()})
    changed = list(kept)
    while True:
        plain = [name for name in changed if name != root and not refs(kept[name]) and size(kept[name]) <= _MOST_SIZE]
        changed = users = [user for user in dict.fromkeys(u for name in plain for u in used_by[name]) if user in kept]
        if not users:
            return kept
        bodies = {name: kept[name] for name in plain}
        for name in users:
            grown = replaced(kept[name], lambda ref, bodies=bodies: bodies.get(ref.name, ref))  # type: ignore[misc]
            if size(grown) > 50 * _MOST_SIZE:
                raise RequestError("The grammar is too large when its rules are written out.", code="grammar_too_large")
            kept[name] = _looped(name, grown)
        for name in plain:
            del kept[name]
