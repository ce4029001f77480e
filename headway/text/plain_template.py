"""Renders chat templates of which no step can take long, so that a short chat needs no other process.

A template comes with a checkpoint, from anybody. It can loop for ever, and one filter can make a string of gigabytes.
Here it is rendered with a budget: each loop pays for all its turns before the first, and each call, filter and operator
for what it makes. What is not known to be harmless, and what the budget does not pay for, raises NotPlain: then the
whole is rendered in a process that can be ended (`process.py`). The templates of the common families are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Each step of a template costs one at least, which is a microsecond or two.
BUDGET = 8192
# Characters of a string, or items of a list, that cost one. They are made in a fraction of a microsecond.
SIZE_OF_ONE = 512
# Operators within a loop that cost one together; most are in branches that are not taken.
NODES_OF_ONE = 16
# Longer strings are not made here: what is done with one takes a few microseconds.
MOST_CHARS = 2**17
MOST_SOURCE_CHARS = 2**16
# Lists and objects that a template builds of others, which can grow exponentially when one is written.
MOST_NESTED = 8

_SIMPLE = (str, int, float, bool, type(None), jinja2.Undefined)
_FORBIDDEN = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.CallBlock,
    nodes.FilterBlock,
)
_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "first", "float", "int", "last", "length", "list", "lower", "map"),
    *("reject", "rejectattr", "safe", "select", "selectattr", "string", "title", "trim", "upper"),
)
_OF_STRINGS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isspace"),
        *("isupper", "lower", "lstrip", "removeprefix", "removesuffix", "rfind", "rindex", "rsplit", "rstrip", "split"),
        *("splitlines", "startswith", "strip", "title", "upper"),
    )
)
_OF_DICTS = frozenset(("get", "items", "keys", "values"))


class NotPlain(Exception):
    """The template does something that may take long."""


class _Charging(NodeTransformer):
    """Has loops and `~` pay, and finds what is not plain. Raises NotPlain."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment
        self._inside = 0  # depth of loops and macros
        self._nested = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _FORBIDDEN):
            raise NotPlain
        if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and getattr(node, "ctx", "load") == "load":
            self._nested += sum(not isinstance(each, (nodes.Const, nodes.Pair)) for each in node.iter_child_nodes())
            if self._nested > (0 if self._inside else MOST_NESTED):
                raise NotPlain
        super().generic_visit(node, *args, **kwargs)
        return node

    def _filtered(self, node: nodes.Expr, name: str, args: list[nodes.Expr]) -> nodes.Filter:
        made = nodes.Filter(node, name, args, [], None, None)
        made.set_lineno(node.lineno).set_environment(self._environment)
        return made

    def visit_Pair(self, node: nodes.Pair, *args: Any, **kwargs: Any) -> nodes.Node:
        self._nested += not isinstance(node.value, nodes.Const)
        return self.generic_visit(node)

    def visit_For(self, node: nodes.For, *args: Any, **kwargs: Any) -> nodes.Node:
        if node.recursive:
            raise NotPlain
        cost = 1 + sum(1 for _ in node.find_all(nodes.Expr)) // NODES_OF_ONE
        target = node.target
        node.target = nodes.Name("_", "store")  # it may be a tuple, which is not built
        self._inside += 1
        self.generic_visit(node)
        self._inside -= 1
        node.target = target
        iterated: Any = node.iter
        node.iter = self._filtered(iterated, "_paid_items", [nodes.Const(cost)])
        return node

    def visit_Macro(self, node: nodes.Macro, *args: Any, **kwargs: Any) -> nodes.Node:
        self._inside += 1
        self.generic_visit(node)
        self._inside -= 1
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(node.nodes[0], "_concat", node.nodes[1:])


def _not_plain(*args: Any, **kwargs: Any) -> Any:
    raise NotPlain


class PlainTemplate:
    """A template with its budget. Not for several threads at once."""

    def __init__(self, template: jinja2.Template | None, environment: _PlainEnvironment) -> None:
        self._template = template
        self._environment = environment

    @classmethod
    def of(cls, whole: jinja2.Environment, source: str) -> PlainTemplate:
        """Compile what is valid Jinja for `whole`, whose extensions and functions it has."""
        environment = _PlainEnvironment(whole)
        if len(source) > MOST_SOURCE_CHARS:
            return cls(None, environment)
        try:
            tree = _Charging(environment).visit(environment.parse(source))
            code = environment.compile(tree)
            return cls(jinja2.Template.from_code(environment, code, environment.make_globals(None)), environment)
        except (NotPlain, jinja2.TemplateError):
            return cls(None, environment)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises NotPlain, and what the template raises."""
        if self._template is None:
            raise NotPlain
        self._environment.left = BUDGET
        return self._template.render(variables)


class _PlainEnvironment(ImmutableSandboxedEnvironment):
    """Every function that a plain template can reach, each with its price."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, whole: jinja2.Environment) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=pass_context(partial(_PlainEnvironment._written, self)),
            extensions=[type(each) for each in whole.extensions.values()],
        )
        self.left = 0
        self.filters = dict.fromkeys(self.filters, _not_plain)
        self.filters |= {name: self._charged(whole.filters[name]) for name in _FILTERS}
        self.filters |= {
            "items": self._items,
            "join": self._join,
            "replace": self._replace,
            "tojson": self._to_json,
            "_concat": lambda *values: self._sized("".join([str(self._simple(value)) for value in values])),
            "_paid_items": self._paid_items,
        }
        self.globals = dict(whole.globals)
        self._functions = {self.globals["raise_exception"], self.globals["strftime_now"], Namespace, safe_range}
        self._dumps = whole.filters["tojson"]

    # --- prices -------------------------------------------------------------------------------------

    def pay(self, price: int) -> None:
        """Raise NotPlain where the budget is spent."""
        self.left -= price
        if self.left < 0:
            raise NotPlain

    def _sized(self, value: Any) -> Any:
        """Pay for a value that has been made, and return it."""
        kind = type(value)
        if kind is str or kind is list or kind is tuple:
            size = len(value)
            if size > MOST_CHARS:
                raise NotPlain
            self.pay(1 + size // SIZE_OF_ONE)
        elif kind is int and abs(value) >> 64:
            raise NotPlain
        else:
            self.pay(1)
        return value

    def _simple(self, value: Any) -> Any:
        """Pay for a value that is to be written, and return it. Raises NotPlain if it is not simple."""
        if not isinstance(value, _SIMPLE):
            raise NotPlain
        return self._sized(value)

    def _written(self, context: Context, value: Any) -> Any:
        if type(value) is str and len(value) < SIZE_OF_ONE and self.left > 0:
            self.left -= 1
            return value
        return self._simple(value)

    def _charged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter of Jinja, with what marks it as one that wants the context or the environment."""

        def charged(*args: Any, **kwargs: Any) -> Any:
            return self._sized(function(*args, **kwargs))

        charged.__dict__.update(getattr(function, "__dict__", {}))
        return charged

    # --- what templates do --------------------------------------------------------------------------

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, name = __self, getattr(__obj, "__name__", "")
        if type(__obj) is not Macro and __obj not in self._functions:
            owner = getattr(__obj, "__self__", None)
            if type(owner) is str and name == "replace" and len(args) == 2 and not kwargs:
                return self._replace(owner, *args)
            if not ((type(owner) is str and name in _OF_STRINGS) or (type(owner) is dict and name in _OF_DICTS)):
                raise NotPlain
            if type(owner) is str:
                self.pay(len(owner) // SIZE_OF_ONE)
        elif name == "_strftime_now" and len(str(args)) > SIZE_OF_ONE:
            raise NotPlain
        return self._sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)):
                self.pay(1 + (len(left) + len(right)) // SIZE_OF_ONE)
            return self._sized(left + right)
        if operator == "**" or not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            raise NotPlain
        return self._sized(super().call_binop(context, operator, left, right))

    def _paid_items(self, values: Any, price: int) -> Any:
        """The values that a loop goes through, after all its turns are paid for."""
        if not hasattr(values, "__len__"):
            values = list(islice(values, self.left + 1))
        self.pay(1 + price * len(values))
        return values

    def _items(self, value: Any) -> Any:
        if isinstance(value, jinja2.Undefined):
            return []
        return self._sized(list(value.items()))

    def _join(self, values: Any, separator: str = "", *more: Any) -> str:
        if more:
            raise NotPlain
        texts = [str(self._simple(value)) for value in islice(values, self.left + 1)]
        if sum(map(len, texts)) + len(separator) * len(texts) > MOST_CHARS:
            raise NotPlain
        return str(self._sized(separator.join(texts)))

    def _replace(self, text: Any, old: str, new: str, *more: Any) -> Any:
        if more or not old or type(text) is not str:
            raise NotPlain
        if len(text) + text.count(old) * len(new) > MOST_CHARS:
            raise NotPlain
        return self._sized(text.replace(old, new))

    def _to_json(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any((isinstance(each, int) and each > 8) or isinstance(each, (str, dict)) for each in given):
            raise NotPlain
        self._pay_for_all(value, 1)
        return self._sized(self._dumps(value, *args, **kwargs))

    def _pay_for_all(self, value: Any, depth: int) -> None:
        """Pay for a value that is written as JSON: for each part as often as it occurs, and for indentation."""
        self.pay(1 + depth // 8)
        if isinstance(value, str):
            self.pay(len(value) // SIZE_OF_ONE)
        elif isinstance(value, dict):
            for key, each in value.items():
                self._pay_for_all(key, depth)
                self._pay_for_all(each, depth + 1)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self._pay_for_all(each, depth + 1)
