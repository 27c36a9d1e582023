"""What is refused when an expression is read, and that nothing else than a refusal can come of bad text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.promql.operators import Matching, Operation
from sidecar.promql.syntax import MAX_EXPRESSION_BYTES, Aggregation, Binary, Call, Negation, Number, Selector, parse
from sidecar.promql.values import PromqlError
from sidecar.store import Matcher


def test_tree() -> None:
    """An expression becomes plain nodes; parentheses and comments leave no trace."""
    tree = parse('-sum by (a) (rate(x{b!~"c|d"}[1m30s] offset -500ms)) > bool on (a) group_left (e) (y) # done')
    selector = Selector((Matcher("__name__", "=", "x"), Matcher("b", "!~", "c|d")), 90_000_000, -500_000)
    matching = Matching(on=True, labels=frozenset("a"), cardinality="left", include=("e",))
    left = Negation(Aggregation("sum", Call("rate", (selector,)), frozenset("a"), without=False))

    assert parse("-sum by (a) (x) > bool 2") == Binary(
        Operation(">", returns_bool=True),
        Negation(Aggregation("sum", parse("x"), frozenset("a"), without=False)),
        Number(2.0),
    )
    assert tree == Binary(Operation(">", returns_bool=True, matching=matching), left, parse("y"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no expression"),
        ("sum(", "unclosed left parenthesis"),
        ("rate(x)", "expected type matrix"),
        ("foo(x)", "unknown function with name 'foo'"),
        ("1 > 2", "BOOL"),
        ("x[5m:1m]", "subqueries are not supported"),
        ("max_over_time(rate(x[1m])[5m:])", "subqueries are not supported"),
        ("x @ 5", "the @ modifier is not supported"),
        ("rate(x[5m] @ end())", "the @ modifier is not supported"),
        ("limitk(3, x)", "the aggregation limitk() is not supported"),
        ("histogram_sum(x)", "the function histogram_sum() is not supported"),
        ("1 + mad_over_time(x[5m])", "the function mad_over_time() is not supported"),
        ('count_values("", x)', "count_values() with an empty label name"),
        ('label_join(x, "", ",", "a")', "label_join() with an empty label name"),
        ('label_replace(x, "a", "b", "c", "(")', "pattern '('"),
        ('{a="b" or c="d"}', "'or' between matchers is not supported"),
        ("a + on (b) fill (0) c", "fill() is not supported"),
        ('x{a=~"(?=b)"}', "illegal regex"),
        ('x{a=~"b{1001}"}', "pattern 'b{1001}'"),
        ("(" * 5_000 + "x" + ")" * 5_000, "5000 operators and brackets, more than 1000"),
        ("-" * 100_000 + "x", "100001 bytes, more than 65536"),
        ("+".join("x" * 500), "nested more than 100 levels"),
        ('x{a="b\\xff"}', "the escape \\xff of a byte is not supported"),
        ('x{a="\\303\\274"}', "the escape \\303 of a byte is not supported"),
        ("x\0", "unexpected character"),
        ("x offset NaN", "the parser cannot read the expression: cannot convert"),
        ("x[1e300]", "the parser cannot read the expression"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    """What cannot be evaluated is refused by name when it is read, however large or deep."""
    with pytest.raises(PromqlError) as caught:
        parse(text)

    assert message in str(caught.value)


def test_the_largest_flat_expression_is_accepted() -> None:
    """A long expression that is not deep is fine up to the limit in bytes."""
    names = "|".join(f"n{index}" for index in range(9_000))
    text = f'x{{a=~"{names}"}}'

    assert len(text) < MAX_EXPRESSION_BYTES
    assert isinstance(parse(text), Selector)


def test_other_escapes_are_accepted() -> None:
    """Escapes of characters, and of a pattern, mean what they mean in Prometheus."""
    values = [matcher.value for matcher in parse(r'x{a="\x41\u00fc", b=~"\\xfc", c="\\\\x"}').matchers]

    assert values == ["x", "Aü", r"\xfc", r"\\x"]


WORDS = [
    *("sum", "rate", "by", "without", "on", "ignoring", "group_left", "bool", "offset", "and", "or", "x", "le", "@"),
    *("(", ")", "[", "]", "{", "}", ",", ":", "=", "=~", "!=", "+", "-", "*", "/", "^", "%", ">", "<", "==", "#"),
    *("1", "0x", "1e", "5m", "NaN", "Inf", '"a"', "'", '"', "`", "\\", "\\x", "é", "\n", " ", "\U0010ffff"),
]


@settings(max_examples=1_000, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join) | st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text whatever makes the parser do anything but return a tree or raise its own error."""
    try:
        parse(text)
    except PromqlError as error:
        assert str(error) != ""  # noqa: PT017 - either outcome is fine
