"""The syntax tree: frozen nodes, known to be supported, with plain typed values."""

from collections.abc import Iterator
from dataclasses import dataclass

from sidecar.promql.operators import Operation
from sidecar.store import NAME_LABEL, Matcher


@dataclass(frozen=True, slots=True)
class Number:
    """A number literal."""

    value: float


@dataclass(frozen=True, slots=True)
class Text:
    """A string literal."""

    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """Series by matchers: instant without a range, a window of samples with one. Durations in microseconds."""

    matchers: tuple[Matcher, ...]
    range_us: int | None
    offset_us: int

    @property
    def name(self) -> str | None:
        """The metric name, when the selector asks for exactly one."""
        return next((m.value for m in self.matchers if m.label == NAME_LABEL and m.operator == "="), None)


@dataclass(frozen=True, slots=True)
class Negation:
    """Unary minus."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class Binary:
    """A binary operator between two expressions."""

    operation: Operation
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class Aggregation:
    """An aggregation over groups of equal `labels`, or equal other labels when `without`.

    `parameter` is the number of elements, the quantile or the label that comes before the operand, None without one.
    """

    operator: str
    operand: "Node"
    labels: frozenset[str]
    without: bool
    parameter: "Node | None" = None


@dataclass(frozen=True, slots=True)
class Call:
    """A function call."""

    function: str
    arguments: tuple["Node", ...]


Node = Number | Text | Selector | Negation | Binary | Aggregation | Call


def children(node: Node) -> tuple[Node, ...]:
    """Return the operands of a node in the order they are written."""
    match node:
        case Negation(operand):
            return (operand,)
        case Aggregation(operand=operand, parameter=parameter):
            return (operand,) if parameter is None else (parameter, operand)
        case Binary(left=left, right=right):
            return (left, right)
        case Call(arguments=arguments):
            return arguments
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and everything below it, in the order it is written."""
    yield node
    for child in children(node):
        yield from walk(child)
