"""A schema document as a graph of nodes: schemas by location, and the targets of references.

References are followed within the document: JSON pointers, `$anchor`, `$id`. `$dynamicRef` and
`$recursiveRef` depend on the path to a schema; they are followed where every path gives the same
target: only one schema has the anchor, or the document's root has it, where every path begins. Read
`reader.py` next.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from martlet.grammar.json.evaluated import settle_unevaluated
from martlet.grammar.json.reader import Reader, escaped, shortened
from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.states import Limits


class Loader:
    """Reads one document. SchemaError for a document that is nested too deep, or too large.

    `root` is its node, `problems` what is refused, `ignored` annotations that look like keywords.
    """

    def __init__(self, document: Any, limits: Limits) -> None:
        self.problems: list[Problem] = []
        self.ignored: list[Problem] = []
        self.enforced: Counter[str] = Counter()  # keywords, and how often each was read
        self._limits = limits
        self._document = document
        self._nodes: dict[int, Node] = {}
        self._keep: list[Any] = []  # made up here, kept so that their ids stay unique
        self._draft = _draft_of(document)
        self._resources: dict[str, Any] = {"": document}
        self._pointers: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[str, dict[str, Any]] = {}  # $dynamicAnchor → base → schema
        self.has_unevaluated = False
        self._index(document, "#", "", 0)
        self.root = self.node(document, "#", "", 0)
        if self.has_unevaluated and not self.problems:
            self.problems += settle_unevaluated(list(self._nodes.values()), self.fresh, self._draft > 8)

    def _index(self, schema: Any, pointer: str, base: str, depth: int) -> None:
        """Record every $id and $anchor, wherever a schema may be."""
        if depth > self._limits.depth:
            raise SchemaError([Problem(pointer[:200], f"nested more than {self._limits.depth} deep")])
        if isinstance(schema, list):
            for i, item in enumerate(schema):
                self._index(item, f"{pointer}/{i}", base, depth + 1)
        if not isinstance(schema, dict):
            return
        base = self._index_id(schema, base)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                self._anchors.setdefault((base, schema[key]), schema)
                if key == "$dynamicAnchor":
                    self._dynamic.setdefault(schema[key], {}).setdefault(base, schema)
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            self.has_unevaluated = True
        self._pointers.setdefault(id(schema), pointer)
        self._bases[id(schema)] = base
        for key, value in schema.items():
            if key not in ("enum", "const", "default", "examples") and isinstance(value, dict | list):
                self._index(value, f"{pointer}/{escaped(key)}", base, depth + 1)

    def _index_id(self, schema: dict[str, Any], base: str) -> str:
        """Record a schema's $id; return the base address inside it."""
        name = schema.get("$id", schema.get("id"))
        if isinstance(name, str) and not ("$ref" in schema and self._draft < 8):
            address, anchor = urldefrag(urljoin(base, name))
            if address:
                base = address
                self._resources.setdefault(base, schema)
            if anchor:
                self._anchors.setdefault((base, anchor), schema)
        return base

    def release(self) -> None:
        """Cut the cycles of recursive schemas; no node may be read afterwards."""
        for node in self._nodes.values():
            node.unlink()
        self._nodes.clear()

    def problem(self, pointer: str, why: str) -> None:
        """Note why the schema is refused."""
        self.problems.append(Problem(pointer, why))

    def node(self, schema: Any, pointer: str, base: str, depth: int) -> Node:
        """The node of a schema."""
        if isinstance(schema, bool):
            return Node(pointer, len(self._nodes), never=not schema)
        if not isinstance(schema, dict):
            self.problem(pointer, f"is {shortened(schema)}; a schema is an object, true or false")
            return Node(pointer)
        known = self._nodes.get(id(schema))
        if known is not None:
            return known
        if depth > self._limits.depth:
            raise SchemaError([Problem(pointer[:200], f"nested more than {self._limits.depth} deep")])
        if len(self._nodes) >= self._limits.nodes:
            raise SchemaError([Problem(pointer[:200], f"more than {self._limits.nodes:,} schemas")])
        made = self._nodes[id(schema)] = Node(pointer, len(self._nodes))
        Reader(self, made, schema, pointer, self._bases.get(id(schema), base), depth, self._draft).read()
        return made

    def made_up(self, schema: dict[str, Any], pointer: str) -> Node:
        """The node of a schema made for a keyword of the document."""
        self._keep.append(schema)
        return self.node(schema, pointer, "", 0)

    def fresh(self, pointer: str) -> Node:
        """A new node without keywords."""
        key = object()
        self._keep.append(key)
        made = self._nodes[id(key)] = Node(pointer, len(self._nodes))
        return made

    def resolve_dynamic(self, key: str, reference: str, base: str) -> tuple[Any, str, str] | str:
        """The target of a $dynamicRef or $recursiveRef (as `resolve`), or why it is unknown."""
        target = self.resolve(reference, base)
        if target is None:
            return "nothing is there in this document"
        schema, _, base_there = target
        root_base = self._bases.get(id(self._document), "")
        if key == "$recursiveRef":
            if not (isinstance(schema, dict) and schema.get("$recursiveAnchor") is True):
                return target
            alike = {self._bases[id(other)]: other for other in self._resources.values() if _is_recursive(other)}
        else:
            name = unquote(urldefrag(reference).fragment)
            alike = self._dynamic.get(name, {})
            if alike.get(base_there) is not schema:
                return target  # a plain anchor or a pointer: as $ref
        if root_base in alike:
            schema = alike[root_base]
        elif len(alike) > 1:
            return "which of several schemas it names depends on the path"
        return schema, self._pointers.get(id(schema), "#"), self._bases[id(schema)]

    def resolve(self, reference: str, base: str) -> tuple[Any, str, str] | None:
        """The target of a $ref: schema, pointer and base; None if it is not in the document."""
        local = reference.startswith("#")  # urljoin does not know names such as urn:…
        address, fragment = (
            (base, reference[1:]) if local else urldefrag(urljoin(base, reference) if base else reference)
        )
        if address not in self._resources:
            address = address if reference.startswith("#") is False and address else base
            if address not in self._resources:
                return None
        schema = self._resources[address]
        pointer = self._pointers.get(id(schema), "#")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            schema = self._anchors.get((address, fragment))
            return None if schema is None else (schema, self._pointers.get(id(schema), "#"), self._bases[id(schema)])
        base_there = self._bases.get(id(schema), address) if isinstance(schema, dict) else address
        for raw in fragment.split("/")[1:]:
            key = raw.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
                schema = schema[int(key)]
            else:
                return None
            base_there = self._bases.get(id(schema), base_there)
            pointer += f"/{raw}"
        return schema, pointer, base_there


def _is_recursive(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("$recursiveAnchor") is True


def _draft_of(document: Any) -> int:
    """4, 6, 7, 8 (2019-09) or 9 (2020-12, the default)."""
    name = document.get("$schema") if isinstance(document, dict) else None
    for text, draft in (("draft-03", 4), ("draft-04", 4), ("draft-06", 6), ("draft-07", 7), ("2019-09", 8)):
        if isinstance(name, str) and text in name:
            return draft
    return 9
