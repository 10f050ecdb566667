import numpy as np
import pytest

from lowtide.errors import UnitError
from lowtide.units import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_budget,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (0, 0),
        (1234, 1234),
        (np.int64(1234), 1234),
        ("1234", 1234),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (" 2 KiB ", 2048),
        ("3kB", 3000),
        ("0.1GB", 10**8),  # in binary floating point this would be one less
        ("1TiB", 2**40),
        ("8G", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("8Gi", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("512m", 512 * 2**20),
        ("1.5 T", 3 * 2**39),
        ("3KB", 3000),
        ("7b", 7),
    ],
)
def test_bytes(given, num_bytes):
    assert parse_bytes(given) == num_bytes


@pytest.mark.parametrize(
    "wrong", [1.5, "1.5", "", "GiB", "-1", -1, "8 gi b", "8GiB/s", "1e9", True, None, "8GiBB", "٣GiB"]
)
def test_what_is_not_a_number_of_bytes_is_refused_with_the_right_spelling(wrong):
    with pytest.raises(UnitError, match="8GiB"):
        parse_bytes(wrong)


@pytest.mark.parametrize("given", [8, "8", " 24 ", 512, np.int64(80)])
def test_a_budget_that_is_a_count_of_gib_is_asked_about(given):
    with pytest.raises(UnitError, match=f"did you mean '{int(given)}GiB'"):
        parse_budget(given)


@pytest.mark.parametrize("given", [0, 1, 513, 1000, "8B", "8GiB", "2 kB"])
def test_any_other_budget_is_what_it_says(given):
    assert parse_budget(given) == parse_bytes(given)


@pytest.mark.parametrize("given", [8.0, 1.5, "1.5"])
def test_a_budget_that_is_a_bare_float_is_refused(given):
    with pytest.raises(UnitError, match="is not a number of bytes; write it like"):
        parse_budget(given)


@pytest.mark.parametrize(
    ("given", "rate"), [("12GB/s", 12 * 10**9), ("500MB/s", 5 * 10**8), ("800B/s", 800), (7, 7), ("7", 7), ("0B/s", 0)]
)
def test_bandwidth(given, rate):
    assert parse_bandwidth(given) == rate


@pytest.mark.parametrize("wrong", ["12GB", "12Gb/s", "12G/s", 1.0, "fast", "12/s", "1.5", -3, False])
def test_what_is_not_a_bandwidth_is_refused(wrong):
    with pytest.raises(UnitError, match="12GB/s"):
        parse_bandwidth(wrong)


def test_what_is_larger_than_the_solvers_count_is_refused_in_one_short_line():
    assert parse_bytes(2**63 - 1) == 2**63 - 1
    assert parse_bandwidth(10**30) == 10**30
    for parse, wrong in ((parse_bytes, 2**63), (parse_bytes, "9000PiB"), (parse_bandwidth, 10**31)):
        with pytest.raises(UnitError, match="too large"):
            parse(wrong)
    for parse in (parse_bytes, parse_bandwidth):
        with pytest.raises(UnitError) as caught:  # more digits than Python reads
            parse("9" * 5000)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("num_bytes", [0, 1, 1023, 1024, 2**20 - 1, 2**20, 5 * 2**30, 2**40 - 1, 3 * 2**41])
def test_what_is_printed_can_be_read_and_is_near(num_bytes):
    assert parse_bytes(format_bytes(num_bytes).replace(" ", "")) == pytest.approx(num_bytes, rel=0.006)


def test_no_unit_is_printed_with_more_than_it_holds():
    assert format_bytes(2**30 - 1) == "1.00 GiB"
    assert format_bytes(2**20 - 1) == "1.00 MiB"


def test_printing():
    assert format_bandwidth(12 * 10**9) == "12 GB/s"
    assert format_bandwidth(800) == "800 B/s"
    assert (format_seconds(2.5), format_seconds(0.0621), format_seconds(3e-6)) == ("2.50 s", "62.1 ms", "3.0 µs")
