"""Bytes and bandwidths as people write them: the only place that parses or prints them.

>>> parse_bytes("8GiB") == parse_bytes("8 gib") == parse_bytes("8G")
True
>>> parse_bandwidth("12GB/s")
12000000000
>>> format_bytes(3 * 2**29)
'1.50 GiB'
"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral

from lowtide.errors import UnitError, shown

# By unit in lower case. A letter alone is binary, as in `docker run --memory 8g` and `java -Xmx8g`.
_FACTORS = {"b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _FACTORS[f"{_letter}b"] = 1000**_power
    for _spelling in (_letter, f"{_letter}i", f"{_letter}ib"):
        _FACTORS[_spelling] = 1024**_power

# One lane of the first PCI Express moves 250 MB/s: so far below it, a unit was forgotten.
_LEAST_LIKELY_BYTES_PER_SECOND = 10**6

# The largest device has 288 GiB: up to here a budget without a unit is a count of GiB. 0 and 1 are not: with them one
# asks for the least budget that works.
_LARGEST_COUNT_OF_GIB = 512

# The compiled loops of the solvers count in 64 bits; of links, this is beyond any.
_LARGEST_BYTES = 2**63 - 1
_LARGEST_BYTES_PER_SECOND = 10**30
# More than a quantity has that anybody writes, and less than Python refuses to read as a number.
_LARGEST_NUM_CHARACTERS = 100

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: int | str) -> int:
    """Read a number of bytes.

    Args:
        value: a whole number of bytes, or a string such as `"1234"`, `"8GiB"`, `"1.5GB"`, `"512MiB"`. Capital and small
            letters are the same, blanks are allowed, and `"8G"` is `"8GiB"`.

    Returns:
        Whole bytes; a fraction of a byte is cut off.

    Raises:
        UnitError: for anything else, a bare float included.
    """
    num_bytes = _parse(value, suffix="", what="number of bytes", examples="1234, 8GiB, 8GB or 512MiB")
    if num_bytes > _LARGEST_BYTES:
        raise UnitError(f"{shown(value)} is too large a number of bytes; the largest is {_LARGEST_BYTES}")
    return num_bytes


def parse_budget(value: int | str, name: str = "memory_budget") -> int:
    """Read the budget for a real network: as `parse_bytes`, but a forgotten unit is asked for.

    Args:
        value: as in `parse_bytes`.
        name: what the caller calls it, for the message.

    Raises:
        UnitError: for what `parse_bytes` refuses, and for a number without a unit that is surely a count of GiB.
    """
    num_bytes = parse_bytes(value)
    if is_count_of_gib(num_bytes) and not (isinstance(value, str) and any(map(str.isalpha, value))):
        few = f"{name}={num_bytes} is {num_bytes} bytes, too few for any network"
        raise UnitError(f"{few}; did you mean '{num_bytes}GiB'?")
    return num_bytes


def is_count_of_gib(num_bytes: int) -> bool:
    """Whether a number of bytes is so small that, for the budget of a network, its unit was probably forgotten.

    >>> is_count_of_gib(8), is_count_of_gib(8 * 2**30), is_count_of_gib(0)
    (True, False, False)
    """
    return 1 < num_bytes <= _LARGEST_COUNT_OF_GIB


def parse_bandwidth(value: int | str) -> int:
    """Read a bandwidth in bytes per second, for instance `"12GB/s"`, `"500MB/s"`, `"800B/s"` or an int.

    The B is a capital letter: a small one is for bits, and `"12Gb/s"` is refused.
    """
    rate = _parse(value, suffix="/s", what="bandwidth", examples="12GB/s, 500MB/s or 800B/s")
    if rate > _LARGEST_BYTES_PER_SECOND:
        raise UnitError(f"{shown(value)} is too large a bandwidth; the largest is {_LARGEST_BYTES_PER_SECOND}B/s")
    return rate


def is_unlikely_bandwidth(bytes_per_second: int) -> bool:
    """Whether no link between a device and its host is that slow, so that a unit was probably forgotten.

    >>> is_unlikely_bandwidth(12), is_unlikely_bandwidth(12_000_000_000), is_unlikely_bandwidth(0)
    (True, False, False)
    """
    return 0 < bytes_per_second < _LEAST_LIKELY_BYTES_PER_SECOND


def _parse(value: int | str, *, suffix: str, what: str, examples: str) -> int:
    refusal = UnitError(f"{shown(value)} is not a {what}; write it like {examples}")
    if isinstance(value, bool):
        raise refusal
    if isinstance(value, Integral):  # numpy's whole numbers, too
        if value < 0:
            raise refusal
        return int(value)
    if not isinstance(value, str):
        raise refusal
    text = value.strip()
    if suffix and text.endswith(suffix):
        text, has_suffix = text[: -len(suffix)], True
    else:
        has_suffix = False
    match = _QUANTITY.fullmatch(text)
    if match is None or len(text) > _LARGEST_NUM_CHARACTERS:
        raise refusal
    number, unit = match.groups()
    if not unit:
        if "." in number or has_suffix:
            raise refusal
        return int(number)
    if unit.lower() not in _FACTORS or (suffix and not (has_suffix and unit.endswith("B"))):
        raise refusal
    return int(Fraction(number) * _FACTORS[unit.lower()])


def format_bytes(num_bytes: int) -> str:
    """Print a number of bytes for people, in binary units: `'1.50 GiB'`, `'512 B'`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if num_bytes >= 1023.995 * 1024 ** (power - 1):  # from here on it would print as 1024 of the smaller unit
            return f"{num_bytes / 1024**power:.2f} {unit}"
    return f"{num_bytes / 1024:.2f} KiB"


def format_bandwidth(bytes_per_second: int) -> str:
    """Print a bandwidth for people, in decimal units: `'12 GB/s'`."""
    for unit, factor in (("GB/s", 10**9), ("MB/s", 10**6), ("kB/s", 10**3)):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.4g} {unit}"
    return f"{bytes_per_second} B/s"


def format_seconds(seconds: float) -> str:
    """Print a duration for people: `'1.25 s'`, `'62.1 ms'`, `'3.0 µs'`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"
