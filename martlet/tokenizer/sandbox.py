"""Jinja2 for chat templates, which come with model files and are untrusted.

On top of Jinja2's immutable sandbox, every loop body, macro, call, filter, operator and literal of
the compiled template asks the `Budget` first. The additions that published templates use are those
of `apply_chat_template` in Hugging Face's transformers: raise_exception, strftime_now, a tojson
without escapes, loop controls, and the generation block. Importing Jinja2 takes 40 ms, so this
module is imported only where a template is rendered. Read `render_budget.py` for the limits.
"""

import functools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from martlet.tokenizer.render_budget import Budget, TemplateLimitError, check_format

__all__ = ["SecurityError", "TemplateRaisedError", "compile_template", "names_read", "run_template"]

PRINTABLE = (str, int, float, bool, type(None), list, tuple, dict, Undefined)
# Costly or random.
LEFT_OUT = ("filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
PASSED = "jinja_pass_arg"  # where Jinja2 keeps what a filter wants as its first argument
STR_METHODS = frozenset(
    re.findall(
        r"\w+",
        """capitalize casefold center count endswith expandtabs find format index isalnum isalpha
        isascii isdecimal isdigit isidentifier islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix
        removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase
        title upper zfill""",
    )
)


class TemplateRaisedError(TemplateError):
    """Raised by a template's raise_exception: its text is for the user."""


def compile_template(source: str) -> types.CodeType:
    """Compile a template; Jinja2's TemplateError for an invalid template."""
    return _Environment(Budget(len(source)), datetime.now).compile(source)


def names_read(source: str) -> set[str]:
    """The variables that a template reads and does not make itself."""
    return meta.find_undeclared_variables(_Environment(Budget(len(source)), datetime.now).parse(source))


def run_template(code: types.CodeType, variables: Mapping[str, Any], now: Callable[[], datetime], given: int) -> str:
    """Render a compiled template.

    Each run has its own environment and budget, so any thread may do it.
    """
    environment = _Environment(Budget(given), now)
    return Template.from_code(environment, code, environment.make_globals(None)).render(variables)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, budget: Budget, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling, where no budget is running
            finalize=_printed,
            extensions=[LoopControlExtension, _Generation],
            cache_size=0,
        )
        self.budget = budget
        self.step = budget.step
        self.made = budget.made
        self.filters = {name: self._bounded(name, call) for name, call in self.filters.items() if name not in LEFT_OUT}
        self.filters["tojson"] = self._tojson
        del self.globals["lipsum"]
        self.globals.update(
            dict=_dict, namespace=_Namespace, raise_exception=_raise, strftime_now=functools.partial(_strftime, now)
        )

    def concat(self, texts: Iterable[str]) -> str:
        """Join the output of a block, a macro or the whole, while it fits."""
        kept, length = [], 0
        for text in texts:
            kept.append(text)
            length += len(text)
            self.budget.expect(length)
        return str(self.made("".join(kept)))

    def joined(self, *values: Any) -> str:
        """The operator ~."""
        return self.concat(str(_checked(value)) for value in values)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in STR_METHODS
        if isinstance(obj, bytes | int | float):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to {attribute!r} is not allowed")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.step()
        self.budget.operator(operator, left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.step()
        if isinstance(__obj, types.BuiltinMethodType) and isinstance(__obj.__self__, str):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            for scope in ("_loop_vars", "_block_vars"):  # Jinja2's own, for functions that take a context
                kwargs.pop(scope, None)
            __self.budget.call(__obj.__name__, (__obj.__self__, *args), kwargs)
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def _bounded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that asks the budget; what it makes bit by bit is charged so."""
        n_passed = int(hasattr(call, PASSED))

        @functools.wraps(call)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.step()
            passed, given = args[:n_passed], list(args[n_passed:])
            if given and isinstance(given[0], Iterator):
                given[0] = list(given[0])
            if name == "sum" and not isinstance(kwargs.get("start", given[2] if len(given) > 2 else 0), int | float):
                raise TemplateLimitError("sum adds numbers only")
            self.budget.call(name, tuple(given), kwargs)
            result = call(*passed, *given, **kwargs)
            return self._counted(result) if isinstance(result, Iterator) else self.made(result)

        return bounded

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield self.made(item)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON with nothing escaped for HTML."""
        self.step()
        self.budget.expect(64 * (self.budget.weigh(separators) + (len(indent) if isinstance(indent, str) else 0)))
        self.budget.call("tojson", (value, indent), {})
        self.budget.expect(self.budget.weigh(value))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.concat([encoder.encode(value)] if indent is None else encoder.iterencode(value))


class _Instrument(NodeTransformer):
    """Puts the questions to the budget into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", *node.nodes).set_lineno(node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("made", node).set_lineno(node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._making(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._making(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._making(node) if node.ctx == "load" else node

    def _making(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", node).set_lineno(node.lineno)

    def _stepping(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step")).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}, which marks the assistant's text for training.

    Here the text is printed as it is.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja2's namespace without names that start with an underscore, and without a text."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # the signature allows a value named self
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace's names cannot start with an underscore")


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


@pass_context
def _printed(context: Context, value: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, _Environment)
    environment.budget.expect(environment.budget.weigh(value))
    return _checked(value)


def _checked(value: Any) -> Any:
    """Refuse to print an object of Python's: its text holds addresses and internals."""
    if not isinstance(value, PRINTABLE):
        raise SecurityError(f"it prints an object of type {type(value).__name__}")
    return value


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise(message: object = "") -> None:
    raise TemplateRaisedError(str(message))


def _strftime(now: Callable[[], datetime], form: str) -> str:
    check_format(form)
    return now().strftime(form)
