from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lowtide.strategies.numerics import kernels
from lowtide.strategies.numerics.sorting import sorted_rows

CALLER = """
from typing import NamedTuple
import numpy as np
from lowtide.strategies.numerics.callee import added
from lowtide.strategies.numerics.kernels import kernel

class {name}(NamedTuple):
    values: np.ndarray

@kernel
def total(record):
    return record.values.sum() + added()

print(total({name}(np.ones(3))))
"""
CALLEE = """
from lowtide.strategies.numerics.kernels import kernel_part

@kernel_part
def added():
    return {more}
"""
# Each import is as if in a process of its own: what it compiled, or found on disk, is forgotten.
IMPORTS = """
import importlib, sys
from pathlib import Path

for caller, callee in {sources!r}:
    Path({folder!r}, "caller.py").write_text(caller)
    Path({folder!r}, "numerics", "callee.py").write_text(callee)
    for name in [name for name in sys.modules if name.startswith("lowtide")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    importlib.import_module("lowtide.strategies.caller")
"""


def test_a_record_with_another_name_and_a_part_changed_in_another_file_are_compiled_anew(tmp_path: Path) -> None:
    """A copy of two modules of the package: a kernel of the one takes a record, and calls a part in the other."""
    numerics = tmp_path / "lowtide" / "strategies" / "numerics"
    numerics.mkdir(parents=True)
    (numerics / "kernels.py").write_text(Path(kernels.__file__).read_text())
    for package in (numerics, numerics.parent, numerics.parent.parent):
        (package / "__init__.py").touch()
    cases = (("Before", 0), ("After", 0), ("After", 1))
    sources = [(CALLER.format(name=name), CALLEE.format(more=more)) for name, more in cases]
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS.format(sources=sources, folder=str(numerics.parent))],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == [3 + more for _, more in cases]
    assert list((numerics.parent / "__pycache__").glob("caller.total*.nbi"))


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_rows_are_sorted_as_by_a_stable_sort(dtype: type) -> None:
    rng = np.random.default_rng(0)
    for size in (*range(10), 16, 17, 100):
        values = rng.integers(0, 1 + size // 2, size).astype(dtype)
        rows = rng.permutation(size)
        assert sorted_rows(rows, values).tolist() == rows[np.argsort(values[rows], kind="stable")].tolist()
        assert sorted_rows(np.arange(size), values).tolist() == np.argsort(values, kind="stable").tolist()
