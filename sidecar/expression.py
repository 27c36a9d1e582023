"""Parse the expression of a definition, with every error at its place in the text."""

import re

from sidecar.promql.syntax import MAX_EXPRESSION_BYTES, Node, parse
from sidecar.promql.values import PromqlError
from sidecar.syntax_position import syntax_error

_STRING = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1|`[^`]*`""", re.DOTALL)
# The parser dies of durations that do not fit its own type, after it has written a trace to stderr.
_ENDLESS_DURATION = re.compile(
    r"(?:\boffset\s*[-+]?\s*|[\[:]\s*)((?:nan|inf)\b|[0-9]{12,}|[0-9][0-9.]*e\+?[0-9]{2,})", re.IGNORECASE
)


class ExpressionError(PromqlError):
    """An expression that is refused, and the character at which to look."""

    def __init__(self, message: str, offset: int | None = None, token: str = "") -> None:
        super().__init__(message, token)
        self.offset = offset


def parse_expression(text: str) -> Node:
    """The checked syntax tree of an expression; raises PromqlError."""
    if len(text) <= MAX_EXPRESSION_BYTES:
        bare = _STRING.sub(lambda match: " " * len(match[0]), text)
        if found := _ENDLESS_DURATION.search(bare):
            raise ExpressionError(f"the duration {found[1]} is too long; shorten it", found.start(1))
    try:
        return parse(text)
    except OverflowError as error:  # a duration of thousands of years
        raise ExpressionError("a duration is too long; shorten it") from error
    except PromqlError as error:
        if not error.token and isinstance(error.__cause__, ValueError) and (found_error := syntax_error(text)):
            raise ExpressionError(*found_error) from error
        raise
