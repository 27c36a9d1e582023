"""Where in an expression the parser gave up: it says what is wrong, but rarely where.

The place of a syntax error is the first token with which no expression can begin: the longest beginning that some
ending still makes an expression is searched for by halving, and the parser itself is asked about each. So there is no
second grammar that could disagree with it.
"""

import itertools
import re

import promql_parser as grammar

_SYNTAX_ERRORS = ("invalid promql query", "no expression found", "unclosed left", "unexpected right", "unterminated")
_LEXER_ERRORS = ("unexpected character", "bad number", "unexpected end of input")
_TOKEN = re.compile(
    r"""\#[^\n]* | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | `[^`]*`
    | [a-zA-Z_][\w:]* | [0-9.][\w.]* | [=!<>]=|=~|!~ | \S""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_FILLS = {
    "": ("", "x", "1m", "(x)", "(a)(x)", "(a) x"),
    "(": ("", "x", "a", "1m", "(x)", "(a)(x)", "(a) x"),
    "[": ("", "1m", ":1m"),
    "{": ("", 'a="a"', '="a"', '"a"'),
}
_TAILS = ("", "(x)", " x")
MAX_TEXT = 10_000
"""Longer expressions are not searched: their errors are shown where they begin."""


def syntax_error(text: str) -> tuple[str, int] | None:
    """What the parser cannot go on with and at which character; None when the error is not one of syntax."""
    message = _error(text)
    if len(text) > MAX_TEXT:
        return None
    if message.startswith(_LEXER_ERRORS):
        return message, _lexer_position(text, message)
    if not message.startswith(_SYNTAX_ERRORS):
        return None
    tokens = [match for match in _TOKEN.finditer(text) if not match[0].startswith("#")]
    low, high = 0, len(tokens)  # the first `low` tokens can begin an expression, the first `high` cannot end one
    while low < high:
        middle = (low + high + 1) // 2
        if _can_begin(text[: tokens[middle - 1].end()], [match[0] for match in tokens[:middle]]):
            low = middle
        else:
            high = middle - 1
    if low == len(tokens):
        return "the expression ends too early", len(text.rstrip())
    return f"unexpected {tokens[low][0][:40]!r}", tokens[low].start()


def _can_begin(text: str, tokens: list[str]) -> bool:
    open_brackets: list[str] = []
    for token in tokens:
        if token in _CLOSING:
            open_brackets.append(token)
        elif token in _CLOSING.values() and (not open_brackets or _CLOSING[open_brackets.pop()] != token):
            return False
    innermost = open_brackets[-1] if open_brackets else ""
    rest = "".join(_CLOSING[bracket] for bracket in reversed(open_brackets[:-1]))
    tails = _TAILS if innermost else ("",)
    return any(
        not _is_syntax_error(f"{text} {fill}{_CLOSING.get(innermost, '')}{tail}{rest}")
        for fill, tail in itertools.product(_FILLS[innermost], tails)
    )


def _is_syntax_error(text: str) -> bool:
    return _error(text).startswith(_SYNTAX_ERRORS)


def _lexer_position(text: str, message: str) -> int:
    """The character at which an error that does not depend on what follows appears first."""
    low, high = 0, len(text)  # `high` characters have the error, `low` do not
    while high - low > 1:
        middle = (low + high) // 2
        if _error(text[:middle]) == message:
            high = middle
        else:
            low = middle
    return max(high - 1, 0)


def _error(text: str) -> str:
    try:
        grammar.parse(text)
    except (ValueError, OverflowError) as error:
        return str(error)
    return ""
