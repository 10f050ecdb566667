"""What a device and its link did, read from a trace."""

from __future__ import annotations

from typing import Any

from benchmarks.link_use import Profile, Span, merged, overlap


def event(kind: str, name: str, begin: float, seconds: float, num_bytes: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin * 1e6, "dur": seconds * 1e6, "args": {"bytes": num_bytes}}


def test_times_are_joined_and_compared() -> None:
    times = merged([Span("", 4.0, 5.0), Span("", 0.0, 2.0), Span("", 1.0, 3.0)])
    assert times == [(0.0, 3.0), (4.0, 5.0)]
    assert overlap(times, [(2.5, 4.5)]) == 1.0
    assert overlap([(2.5, 4.5)], times) == 1.0


def test_a_report_tells_kernels_copies_and_waits() -> None:
    profile = Profile()
    profile.read(
        [
            event("kernel", "gemm", 0.0, 1.0),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.5, 1.0, 50 * 10**9),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1.0, 1.0, 20 * 10**9),
            event("kernel", "gemm", 2.0, 1.0),
            event("cpu_op", "aten::mm", 0.0, 9.0),
        ]
    )
    lines = profile.report().splitlines()
    assert lines[0] == "  device 3.000 s, kernels 2.000 s"
    assert "HtoD 50.00 GB in 1.000 s, 50.0 GB/s, 1 copies; 0.500 s of it beside kernels, 0.500 s" in lines[1]
    assert "DtoH 20.00 GB in 1.000 s, 20.0 GB/s, 1 copies; 0.000 s of it beside kernels, 0.500 s" in lines[2]
    assert lines[3] == "  no kernel for 1.000 s in 1 long waits, 0.000 s in short ones"
    assert lines[4] == "    at 1.000 s for 1000 ms (HtoD 500, DtoH 1000 ms busy)"
    assert lines[5] == "    2.000 s in 2 of gemm"


def test_a_report_of_nothing() -> None:
    assert Profile().report() == "  nothing ran on the device"
