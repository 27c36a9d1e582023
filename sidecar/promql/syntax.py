"""From text to a small syntax tree of our own, with every construct the engine lacks refused by name.

`promql_parser` does the grammar and the types. Its tree is copied into frozen nodes, so that the engine and the checks
work on plain typed values, and so that what reaches them is already known to be supported.

The parser recurses on the native stack and kills the process on deep input (seen at 10,000 levels, fine at 4,000), so
the number of operators and brackets is bounded before it sees the text.
"""

import datetime as dt
import re
from collections.abc import Callable
from typing import Any, Literal

import promql_parser as grammar

from sidecar.promql.aggregations import AGGREGATIONS
from sidecar.promql.functions import FUNCTIONS
from sidecar.promql.nodes import (
    Aggregation,
    Binary,
    Call,
    Negation,
    Node,
    Number,
    Selector,
    Text,
    children,
    walk,
)
from sidecar.promql.operators import OPERATORS, Matching, Operation
from sidecar.promql.relabeling import whole_value_pattern
from sidecar.promql.values import PromqlError
from sidecar.store import NAME_LABEL, Matcher, MatchOperator, matches_pattern

__all__ = [
    "MAX_EXPRESSION_BYTES",
    "Aggregation",
    "Binary",
    "Call",
    "Negation",
    "Node",
    "Number",
    "Selector",
    "Text",
    "children",
    "parse",
    "walk",
]

MAX_EXPRESSION_BYTES = 64 * 1024
MAX_STRUCTURE = 1_000
"""Operators and brackets in one expression, also those inside strings."""
MAX_DEPTH = 100

_STRUCTURE = re.compile(r"[-+*/%^=<>(\[{]|\b(?:and|or|unless|atan2)\b")
_HIGH_BYTE = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:x[89a-fA-F][0-9a-fA-F]|[23][0-7]{2}))")
"""An escape of a byte above 127, which the parser takes for a character instead of a part of UTF-8."""
_MATCH_OPERATORS: dict[str, MatchOperator] = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
_CARDINALITIES: dict[str, Literal["one", "left", "right", "many"]] = {
    "OneToOne": "one",
    "ManyToOne": "left",
    "OneToMany": "right",
    "ManyToMany": "many",
}


def parse(text: str) -> Node:
    """Return the checked syntax tree of an expression. Raises PromqlError that says what is wrong and where."""
    if (size := len(text.encode(errors="replace"))) > MAX_EXPRESSION_BYTES:
        raise PromqlError(f"the expression has {size} bytes, more than {MAX_EXPRESSION_BYTES}; split it up")
    if (size := len(_STRUCTURE.findall(text))) > MAX_STRUCTURE:
        raise PromqlError(f"the expression has {size} operators and brackets, more than {MAX_STRUCTURE}; split it up")
    if (high := _HIGH_BYTE.search(text)) is not None:
        raise PromqlError(f"the escape {high[1]} of a byte is not supported; write the character itself", high[1])
    try:
        tree = grammar.parse(text)
    except ValueError as error:
        raise PromqlError(str(error), _function_at_fault(str(error))) from error
    except BaseException as error:
        # A panic inside the parser (`offset NaN` is one) is no Exception, and its class is not exported.
        if type(error).__name__ != "PanicException":
            raise
        raise PromqlError(f"the parser cannot read the expression: {error}") from error
    return _convert(tree, 0)


def _function_at_fault(message: str) -> str:
    named = re.search(r"function(?: with name)? '(\w+)'", message)
    return named[1] if named else ""


def _convert(tree: Any, depth: int) -> Node:  # noqa: ANN401 - the parser types its children as Any
    if depth > MAX_DEPTH:
        raise PromqlError(f"the expression is nested more than {MAX_DEPTH} levels deep; split it up")
    converter = _CONVERTERS.get(type(tree))
    if converter is None:
        raise _refused(f"{type(tree).__name__} is", "")
    return converter(tree, depth + 1)


def _refused(what: str, token: str) -> PromqlError:
    return PromqlError(f"{what} not supported here", token)


def _number(tree: grammar.NumberLiteral, _depth: int) -> Node:
    return Number(tree.val)


def _text(tree: grammar.StringLiteral, _depth: int) -> Node:
    return Text(tree.val)


def _parentheses(tree: grammar.ParenExpr, depth: int) -> Node:
    return _convert(tree.expr, depth)


def _instant(tree: grammar.VectorSelector, _depth: int) -> Node:
    return _selector(tree, None)


def _ranged(tree: grammar.MatrixSelector, _depth: int) -> Node:
    return _selector(tree.vector_selector, tree.range)


def _subquery(_tree: grammar.SubqueryExpr, _depth: int) -> Node:
    raise PromqlError("subqueries are not supported; define the inner expression over a plain range instead", ":")


def _selector(tree: grammar.VectorSelector, range_: dt.timedelta | None) -> Selector:
    name = [Matcher(NAME_LABEL, "=", tree.name)] if tree.name else []
    if tree.at is not None:
        raise _refused("the @ modifier is", "@")
    if tree.matchers.or_matchers:
        raise _refused("'or' between matchers is", " or ")
    conditions = [
        Matcher(matcher.name, _MATCH_OPERATORS[str(matcher.op).rpartition(".")[2]], matcher.value)
        for matcher in tree.matchers.matchers
    ]
    for condition in conditions:
        if condition.operator in {"=~", "!~"}:
            try:
                matches_pattern(condition.value, "")
            except ValueError as error:
                raise PromqlError(str(error), condition.value) from error
    return Selector(
        matchers=(*name, *conditions),
        range_us=None if range_ is None else range_ // dt.timedelta(microseconds=1),
        offset_us=(tree.offset or dt.timedelta()) // dt.timedelta(microseconds=1),
    )


def _negation(tree: grammar.UnaryExpr, depth: int) -> Node:
    return Negation(_convert(tree.expr, depth))


def _binary(tree: grammar.BinaryExpr, depth: int) -> Node:
    operator = str(tree.op)
    if operator not in OPERATORS:
        raise _refused(f"the operator {operator} is", operator)
    modifier = tree.modifier
    matching = Matching()
    if modifier is not None:
        if modifier.fill_values.lhs is not None or modifier.fill_values.rhs is not None:
            raise _refused("fill() is", "fill")
        matching = Matching(
            on=modifier.matching is not None and modifier.matching.type == grammar.LabelModifierType.Include,
            labels=frozenset(modifier.matching.labels if modifier.matching else ()),
            cardinality=_CARDINALITIES[str(modifier.card).rpartition(".")[2]],
            include=tuple(modifier.group_labels or ()),
        )
    returns_bool = modifier is not None and modifier.return_bool
    operation = Operation(operator, returns_bool=returns_bool, matching=matching)
    return Binary(operation, _convert(tree.lhs, depth), _convert(tree.rhs, depth))


def _aggregation(tree: grammar.AggregateExpr, depth: int) -> Node:
    operator = str(tree.op)
    if operator not in AGGREGATIONS:
        raise _refused(f"the aggregation {operator}() is", operator)
    modifier = tree.modifier
    parameter = None if tree.param is None else _convert(tree.param, depth)
    if operator == "count_values":
        _check_label(operator, parameter)
    return Aggregation(
        operator=operator,
        operand=_convert(tree.expr, depth),
        labels=frozenset(modifier.labels if modifier else ()),
        without=modifier is not None and modifier.type == grammar.AggModifierType.Without,
        parameter=parameter,
    )


def _call(tree: grammar.Call, depth: int) -> Node:
    if tree.func.name not in FUNCTIONS:
        raise _refused(f"the function {tree.func.name}() is", tree.func.name)
    function = tree.func.name
    arguments = tuple(_convert(argument, depth) for argument in tree.args)
    if function == "label_replace":
        _check_label(function, arguments[1])
        pattern = arguments[4]
        assert isinstance(pattern, Text), "the parser demands a string"
        whole_value_pattern(pattern.value)
    elif function == "label_join":
        for argument in (arguments[1], *arguments[3:]):
            _check_label(function, argument)
    return Call(function, arguments)


def _check_label(function: str, node: Node | None) -> None:
    if isinstance(node, Text) and not node.value:
        raise PromqlError(f"{function}() with an empty label name; name a label", function)


_CONVERTERS: dict[type, Callable[[Any, int], Node]] = {
    grammar.NumberLiteral: _number,
    grammar.StringLiteral: _text,
    grammar.ParenExpr: _parentheses,
    grammar.VectorSelector: _instant,
    grammar.MatrixSelector: _ranged,
    grammar.SubqueryExpr: _subquery,
    grammar.UnaryExpr: _negation,
    grammar.BinaryExpr: _binary,
    grammar.AggregateExpr: _aggregation,
    grammar.Call: _call,
}
