"""The text of a file of definitions, and where in it things stand.

tomllib gives values without positions, so they are found in the text: the n-th `[[metric]]` header, the key under it,
and then the character of the value, through the quotes and escapes of TOML.
"""

import hashlib
import re
import tomllib
from pathlib import Path

import msgspec

MAX_FILE_BYTES = 1024 * 1024
MAX_DEFINITIONS = 1_000

_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*(?:metric|\"metric\"|'metric')[ \t]*\]\]", re.MULTILINE)
_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)| \(at end of document\)")
_QUOTES = ("'''", '"""', "'", '"')
_ESCAPE_WIDTHS = {"u": 6, "U": 10}
_CONTINUATION = re.compile(r"\\[ \t]*\n\s*")


class Complaint(msgspec.Struct, frozen=True):
    """One thing wrong with a definition: the key that holds it, and what of its value to look at.

    `offset` counts characters of the value; without one, `token` is looked for in it.
    """

    message: str
    key: str = ""
    token: str = ""
    offset: int | None = None


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with a file. Line and column count from 1 and are 0 where there is none to name."""

    file: Path
    line: int = 0
    column: int = 0
    metric: str = ""
    message: str

    def __str__(self) -> str:
        place = "".join(f":{number}" for number in (self.line, self.column) if number)
        metric = f"{self.metric}: " if self.metric else ""
        return f"{self.file}{place}: {metric}{self.message}"


class DefinitionsError(ValueError):
    """A file that was refused, with everything wrong with it, one line each."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class Source:
    """The text of a file.

    Args:
        file: named in every problem.
        content: what it holds.

    Raises:
        DefinitionsError: it is too long, empty, or not UTF-8.
    """

    def __init__(self, file: Path, content: bytes) -> None:
        self.file = file
        self.digest = digest_of(content)
        self.content = content
        self.text = ""
        if len(content) > MAX_FILE_BYTES:
            raise self.refusal(f"the file has more than {MAX_FILE_BYTES} bytes; split it up")
        if not content.strip():
            # What an editor leaves while it writes, and so never a wish to have no definitions.
            raise self.refusal("the file is empty; write definitions, or a comment to have none")
        try:
            self.text = content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise self.refusal("the file is not UTF-8; save it as UTF-8", line) from error
        if self.text.startswith("\ufeff"):
            raise self.refusal("the file begins with a byte order mark; save it as UTF-8 without one", 1)
        self._headers = [match.start() for match in _HEADER.finditer(self.text)]

    def tables(self) -> list[dict[str, object]]:
        """The `[[metric]]` tables; raises DefinitionsError."""
        try:
            document = tomllib.loads(self.text)
        except RecursionError as error:
            raise self.refusal("the file is not a file of metrics: its values are nested too deeply") from error
        except ValueError as error:  # TOMLDecodeError, and what int() says of a number with too many digits
            raise self._syntax_refusal(str(error)) from error
        tables = document.pop("metric", [])
        if document:
            names = ", ".join(list(document)[:10])
            found = re.search(rf"^[ \t]*\[*[ \t]*[\"']?{re.escape(next(iter(document)))}\b", self.text, re.MULTILINE)
            line, _ = self._place(found.start() if found else None)
            raise self.refusal(f"unknown keys {names}; a file holds [[metric]] tables and nothing else", line)
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self.refusal("metric must be a list of tables; write [[metric]] above each definition", 1)
        if len(tables) > MAX_DEFINITIONS:
            raise self.refusal(f"the file has {len(tables)} metrics, more than {MAX_DEFINITIONS}; split it up")
        if len(tables) != len(self._headers):
            self._headers = []  # inline tables, or a header inside a string: no line is better than a wrong one
        return tables

    def line(self, index: int, key: str = "") -> int:
        """Line of a key of the table with an index, or of its header; 0 when not known."""
        return self._place(self._found(index, key))[0]

    def problem(self, complaint: Complaint, index: int, metric: str) -> Problem:
        """Give a complaint about the table with an index its place."""
        position = self._found(index, complaint.key)
        column = 0
        line, _ = self._place(position)
        if complaint.key and position is not None and (complaint.token or complaint.offset is not None):
            line, column = self._place(self._inside(position, complaint))
        return Problem(file=self.file, line=line, column=column, metric=metric, message=complaint.message)

    def refusal(self, message: str, line: int = 0, column: int = 0) -> DefinitionsError:
        """The error for something that concerns the whole file."""
        return DefinitionsError((Problem(file=self.file, line=line, column=column, message=message),))

    def _syntax_refusal(self, message: str) -> DefinitionsError:
        found = _POSITION.search(message)
        line, column = (int(found[1]), int(found[2])) if found and found[1] else (0, 0)
        if found and not line:
            line = self.text.count("\n") + 1
        text = _POSITION.sub("", message)
        return self.refusal(f"the file is not TOML: {text}; correct the syntax", line, column)

    def _found(self, index: int, key: str) -> int | None:
        """Position of a key's value in the table with an index, else of the table's header."""
        if index >= len(self._headers):
            return None
        start = self._headers[index]
        end = self._headers[index + 1] if index + 1 < len(self._headers) else len(self.text)
        found = self._key(key, start, end) if key else None
        return start if found is None else found

    def _key(self, key: str, start: int, end: int) -> int | None:
        pattern = re.compile(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*=[ \t]*", re.MULTILINE)
        match = pattern.search(self.text, start, end)
        return match.end() if match else None

    def _inside(self, start: int, complaint: Complaint) -> int:
        """Position of what a complaint points at, inside the value that begins at `start`."""
        offsets = string_offsets(self.text, start)
        if not offsets:
            return start
        offset = complaint.offset
        if offset is None:
            value = "".join(self.text[position] for position in offsets[:-1])
            offset = max(find_token(value, complaint.token), 0)
        return offsets[min(offset, len(offsets) - 1)]

    def _place(self, position: int | None) -> tuple[int, int]:
        if position is None:
            return 0, 0
        return self.text.count("\n", 0, position) + 1, position - self.text.rfind("\n", 0, position)


def read_source(file: Path) -> Source:
    """Read a file; raises DefinitionsError."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"cannot be read: {reason}; give the path of a readable TOML file"
        raise DefinitionsError((Problem(file=file, message=message),)) from error
    return Source(file, content)


def digest_of(content: bytes) -> str:
    """Sixteen hex digits of the SHA-256 of what a file holds."""
    return hashlib.sha256(content).hexdigest()[:16]


def find_token(text: str, token: str) -> int:
    """Where a token stands in a text, preferably as a whole word; -1 if nowhere."""
    whole = re.search(rf"(?<![\w:]){re.escape(token)}(?![\w:])", text) if token else None
    return whole.start() if whole else text.find(token)


def string_offsets(text: str, start: int) -> list[int]:
    """Positions of the characters of the TOML string that begins at `start`, then of its end; empty if none does."""
    quote = next((quote for quote in _QUOTES if text.startswith(quote, start)), None)
    if quote is None:
        return []
    position = start + len(quote)
    is_multiline, has_escapes = len(quote) > 1, quote[0] == '"'
    if is_multiline and text.startswith("\n", position):
        position += 1
    offsets = []
    while position < len(text) and not text.startswith(quote, position):
        width = 1
        if has_escapes and text[position] == "\\":
            if is_multiline and (continued := _CONTINUATION.match(text, position)):
                position = continued.end()
                continue
            width = _ESCAPE_WIDTHS.get(text[position + 1 : position + 2], 2)
        offsets.append(position)
        position += width
    return [*offsets, position]
