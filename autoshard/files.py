"""Reading of user files and atomic writing, for every room.

Files come from outside and may hold anything. Whatever their bytes are, a reader here either returns plain data
(dicts, lists, text, numbers, booleans, None) or raises `FileFormatError` with the path and the reason. It refuses
what plain data cannot carry faithfully or safely: files over a size limit, numbers that are not finite, keys given
twice, deep nesting, and YAML anchors, aliases and tags.
"""

import contextlib
import decimal
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Hashable, Iterator
from typing import Any, NoReturn

import yaml

from autoshard.errors import FileFormatError

MAX_YAML_BYTES = 1 << 20
MAX_JSON_BYTES = 256 << 20
MAX_DEPTH = 64

_INT = re.compile(r"[-+]?[0-9][0-9_]*\Z")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")


def read_yaml(path: str | os.PathLike[str], *, max_bytes: int = MAX_YAML_BYTES, max_depth: int = MAX_DEPTH) -> object:
    """Reads one YAML document as plain data.

    Plain scalars are read as YAML 1.2 reads them: `1e9` is a number, `yes` and `2024-01-01` are text, `010` is ten.
    Underscores may group the digits of a number.

    Args:
      path: The file.
      max_bytes: Greatest legal size of the file.
      max_depth: Greatest legal nesting of mappings and sequences.

    Returns:
      The data; None for an empty file.

    Raises:
      FileFormatError: If the file cannot be read, is too large, is not UTF-8, is not YAML, or holds what the
        module docstring rules out.
    """
    return parse_yaml(_read_text(path, max_bytes), path, max_depth=max_depth)


def parse_yaml(text: str, origin: str | os.PathLike[str], *, max_depth: int = MAX_DEPTH) -> object:
    """Parses one YAML document as `read_yaml` does.

    Args:
      text: The document.
      origin: What to call it in errors.
      max_depth: Greatest legal nesting of mappings and sequences.

    Returns:
      The data; None for an empty document.

    Raises:
      FileFormatError: If it is not YAML, or holds what the module docstring rules out.
    """
    with _explained(origin, "YAML"):
        _check_yaml_events(origin, text, max_depth)
        data = yaml.load(text, Loader=_PlainLoader)
        _check_data(origin, data, max_depth)
    return data


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_DEPTH) -> object:
    """Reads one JSON document as plain data.

    Args:
      path: The file.
      max_bytes: Greatest legal size of the file.
      max_depth: Greatest legal nesting of objects and arrays.

    Returns:
      The data.

    Raises:
      FileFormatError: If the file cannot be read, is too large, is not UTF-8, is not JSON, or holds what the
        module docstring rules out.
    """
    text = _read_text(path, max_bytes)
    with _explained(path, "JSON"):
        data = json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
        _check_data(path, data, max_depth)
    return data


def yaml_text(data: object) -> str:
    """Writes plain data as YAML text that `read_yaml` reads back to equal data.

    Args:
      data: Dicts, lists, text, finite numbers, booleans and None.

    Returns:
      The text, in block style, text of several lines too, keys in their order, other characters than ASCII escaped.

    Raises:
      ValueError: If a number is not finite.
    """
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, width=110)


def append_text(path: str | os.PathLike[str], text: str) -> None:
    """Adds UTF-8 text to the end of a file, which is made if it is missing: all of it, or nothing.

    Raises:
      OSError: It cannot be written, as on a full disk.
    """
    content = text.encode()
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


class LineFile:
    """A file of lines that readers follow. Those that the disk does not take, as when it is full, follow later."""

    def __init__(self, path: str | os.PathLike[str]):
        """Lines will be added to `path`, which is made with the first if it is missing."""
        self._path = path
        self._unwritten = ""

    def add(self, line: str) -> None:
        """Adds a line, given without its end; it is complete for readers of the file when this returns.

        Raises:
          OSError: It cannot be written; it will be added with the next one.
        """
        self._unwritten += f"{line}\n"
        append_text(self._path, self._unwritten)
        self._unwritten = ""


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 file as `write_bytes_atomically` does.

    Raises:
      FileFormatError: If the text cannot be encoded or the file cannot be written; the old file is untouched.
    """
    try:
        content = text.encode()
    except ValueError as error:
        raise _not_written(path, error) from error
    write_bytes_atomically(path, content)


def write_bytes_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file so that readers see the old content or the new one, never a part.

    The content goes to a temporary file in the same folder, is flushed to the disk, and then takes the name. A
    symbolic link is followed, so its target is replaced.

    Args:
      path: The file.
      content: Its new content.

    Raises:
      FileFormatError: If the file cannot be written; the old file is untouched.
    """
    temporary = None
    try:
        target = os.path.realpath(path)
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = os.path.dirname(target)
        name = os.path.join(folder, f".{secrets.token_hex(8)}.tmp")
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)
        temporary = name
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = None
        _sync_folder(folder)
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _not_written(path: str | os.PathLike[str], error: OSError | ValueError) -> FileFormatError:
    return FileFormatError(
        f"{_shown(path)}: the file cannot be written: {_reason(error)}. Check the folder, its "
        "permissions and its space."
    )


class _PlainLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's plain scalars, without merge keys, and with unique keys."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a scalar", key_node.start_mark)
            key = self.construct_object(key_node)
            if key in mapping:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node).replace("_", ""))

    def construct_float(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node)
        number = math.nan if _NOT_FINITE.match(text) else float(text.replace("_", ""))
        if not math.isfinite(number):
            raise yaml.constructor.ConstructorError(None, None, f"the number {text} is not finite", node.start_mark)
        return number


class _PlainDumper(yaml.SafeDumper):
    """Writes everything in full, and text in quotes where YAML 1.2 or 1.1 would read it as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_float(self, data: float) -> yaml.ScalarNode:
        if not math.isfinite(data):
            raise ValueError(f"every number in a file must be finite; received {data!r}.")
        text = repr(data)
        if data and not 1e-3 <= abs(data) < 1e6:
            mantissa, _, exponent = f"{decimal.Decimal(text).normalize():E}".partition("E")
            text = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
        return self.represent_scalar("tag:yaml.org,2002:float", text)

    def represent_lines(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


for _tag, _pattern, _first_characters in (
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("float", _NOT_FINITE, "-+."),
    ("bool", _BOOL, "tTfF"),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    for _class in (_PlainLoader, _PlainDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first_characters))
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_int)
_PlainLoader.add_constructor("tag:yaml.org,2002:float", _PlainLoader.construct_float)
_PlainDumper.add_representer(float, _PlainDumper.represent_float)
_PlainDumper.add_representer(str, _PlainDumper.represent_lines)


def _read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    shown = _shown(path)
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileFormatError(f"{shown}: only regular files can be read; this is something else.")
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{shown}: the file cannot be read: {_reason(error)}. Check the path.") from error
    if len(content) > max_bytes:
        raise FileFormatError(f"{shown}: the file may have at most {max_bytes} bytes; it has more.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{shown}: the file must be UTF-8 text; byte {error.start} is not. Save it with that encoding."
        ) from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens without waiting for a writer, should the path be a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str], language: str) -> Iterator[None]:
    """Turns whatever a parser raises into a `FileFormatError` that names the file."""
    try:
        yield
    except RecursionError as error:
        raise FileFormatError(f"{_shown(path)}: the {language} is nested too deeply. Flatten it.") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise FileFormatError(
            f"{_shown(path)}: this is not plain {language}: {reason:.300}. Correct the file."
        ) from error


def _check_yaml_events(path: str | os.PathLike[str], text: str, max_depth: int) -> None:
    """Refuses anchors, aliases, tags and deep nesting before anything is built from the document."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise FileFormatError(
                f"{_shown(path)}, line {line}: anchors and aliases (& and *) are not allowed. Spell it out."
            )
        if getattr(event, "tag", None) is not None:
            raise FileFormatError(
                f"{_shown(path)}, line {line}: tags are not allowed; received {event.tag!r:.60}. Remove it."
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > max_depth:
                raise FileFormatError(
                    f"{_shown(path)}, line {line}: at most {max_depth} levels of nesting are allowed."
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_data(path: str | os.PathLike[str], data: Any, max_depth: int) -> None:
    """Refuses deep nesting, numbers that overflowed, and text that no file could hold again."""
    level, depth = [data], 0
    while level:
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is list or kind is dict:
                if depth >= max_depth:
                    raise FileFormatError(f"{_shown(path)}: at most {max_depth} levels of nesting are allowed.")
                inner += item
                if kind is dict:
                    inner += item.values()
            elif kind is str:
                if not item.isascii():
                    item.encode()
            elif kind is float and not math.isfinite(item):
                raise FileFormatError(f"{_shown(path)}: every number must be finite; received one that is too large.")
        level, depth = inner, depth + 1


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {repeated!r:.60} is given twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name} is not finite")


def _sync_folder(folder: str) -> None:
    """Makes a rename durable, where the system can open folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _shown(path: str | os.PathLike[str]) -> str:
    """The path as text that can be printed."""
    return os.fsdecode(path).encode(errors="backslashreplace").decode()


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
