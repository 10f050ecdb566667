"""Reading and writing the JSON files of lowtide: size-checked, one-line refusals, atomic replacement."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError, shown

# A chain of 10,000 stages is about 4 MB and a schedule of a million operations about 30 MB: what is larger is not ours.
_LARGEST_FILE_BYTES = 256 * 2**20


def read_json(
    path: str | os.PathLike[str], refuse: type[LowtideError], check: Callable[[Any], object] | None = None
) -> Any:
    """Return the JSON value in a file; whatever is wrong with it is one line of type `refuse`.

    Args:
        path: the file.
        refuse: the type of the error.
        check: raises a `refuse` that names the field of a wrong number; called where the file has a NaN or an
            Infinity, which JSON does not know and other programs write all the same.
    """
    path = _as_path(path, refuse)
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _LARGEST_FILE_BYTES:
            raise refuse(f"{path}: {num_bytes} bytes is more than any file of lowtide holds; is it the right file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise refuse(f"{path}: cannot be read: {error.strerror or error}; is the path right?") from None
    except UnicodeDecodeError:
        raise refuse(f"{path}: is not a JSON text; is it the right file?") from None
    constants: list[str] = []
    try:
        value = json.loads(text, parse_constant=lambda name: _noted(name, constants), object_pairs_hook=_object)
    except RecursionError:
        raise refuse(f"{path}: is nested too deeply to be a file of lowtide; is it the right file?") from None
    except ValueError as error:
        raise refuse(f"{path}: is not valid JSON ({error}); is it the right file, and not cut short?") from None
    if not constants:
        return value
    try:
        if check is not None:
            check(value)
    except refuse as error:
        raise refuse(f"{path}: {error}") from None
    raise refuse(f"{path}: is not valid JSON ({constants[0]} is not a number that JSON knows); is it the right file?")


def check_can_write(path: str | os.PathLike[str], *read: str | os.PathLike[str]) -> None:
    """Refuse a path that cannot be written, or should not be, before work is done whose result goes there.

    Args:
        path: where the result is to go.
        read: the files that the work begins with.
    """
    path = _as_path(path, LowtideError)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a folder that may not be entered, links that go round
        raise LowtideError(f"{path}: cannot be written: {error.strerror or error}; name another file") from None
    if not path.name or path.is_dir():
        raise LowtideError(f"{str(path)!r} cannot be written: it is a folder; name a file")
    if path.exists() and not path.is_file():  # a file would be put in its place
        raise LowtideError(f"{path}: cannot be written: it is a device or a pipe; name a file")
    if any(os.path.realpath(path) == os.path.realpath(other) for other in read):
        raise LowtideError(f"{path}: cannot be written: it is the file to be read; name another one")
    if not path.parent.is_dir():
        raise LowtideError(f"{path}: cannot be written: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise LowtideError(f"{path}: cannot be written: no permission to write in {path.parent}; name another folder")


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Write a JSON file so that at any moment the old file or the new one is there, whole."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically: a temporary file beside it, flushed to disk, then renamed over it.

    A link stays one: what it points to is written.
    """
    check_can_write(path)
    path = Path(os.path.realpath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise LowtideError(f"{path}: cannot be written: {error.strerror or error}; name another file") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise LowtideError(f"{path}: cannot be written: {error.strerror or error}; name another file") from None
        raise


def _as_path(path: Any, refuse: type[LowtideError]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise refuse(f"path is {shown(path)}, expected the path of a file")
    return Path(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different: with one there twice, which value is meant is a guess."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {shown(twice)} twice")
    return made


def _noted(name: str, constants: list[str]) -> float:
    constants.append(name)
    return float(name)
