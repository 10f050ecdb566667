"""What the host has to give, from the system's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.errors import ExecutionError
from lowtide.runtime.transfer import host_memory
from lowtide.runtime.transfer.host_memory import available_host_bytes, check_host_has

TABLE = "MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:  2000 kB\nCached:  1900 kB\n"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(TABLE)
    return path


def container(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("900000\n")
    (folder / "memory.stat").write_text("anon 500000\ninactive_file 300000\nactive_file 100000\n")
    return folder


def test_files_that_are_only_cached_are_no_obstacle(system, tmp_path):
    assert available_host_bytes(system, tmp_path / "nowhere") == 2000 * 1024


def test_a_container_has_less(system, tmp_path):
    assert available_host_bytes(system, container(tmp_path, "1000000")) == 400_000
    assert available_host_bytes(system, container(tmp_path, "max")) == 2000 * 1024


@pytest.mark.parametrize("text", ["", "MemFree: 5 kB", "MemAvailable: ? kB", "MemAvailable:"])
def test_a_table_that_says_nothing(tmp_path, text):
    path = tmp_path / "meminfo"
    path.write_text(text)
    assert available_host_bytes(path, tmp_path) > 2**20  # as the C library says


def test_more_than_there_is_is_refused(monkeypatch):
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2**30)
    check_host_has(2**30)
    with pytest.raises(ExecutionError, match=r"8.00 GiB of host memory are needed .* 1.00 GiB are available") as caught:
        check_host_has(2**33)
    assert "\n" not in str(caught.value)
