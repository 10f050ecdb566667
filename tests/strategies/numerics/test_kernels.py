from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lowtide.strategies.numerics import kernels

MODULE = """
from typing import NamedTuple
import numpy as np
from lowtide.strategies.numerics.kernels import kernel

class {name}(NamedTuple):
    values: np.ndarray

@kernel
def total(record):
    return record.values.sum() + {more}

print(total({name}(np.ones(3))))
"""


def test_a_record_that_got_another_name_is_compiled_anew(tmp_path: Path) -> None:
    for name, more in (("Before", 0), ("After", 1), ("After", 1)):
        (tmp_path / "module.py").write_text(MODULE.format(name=name, more=more))
        done = subprocess.run(
            [sys.executable, "-c", "import module"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) == 3 + more


def test_a_function_whose_callee_changed_in_another_file_is_compiled_anew(tmp_path: Path) -> None:
    """A copy of two modules of the package: the one calls a kernel of the other."""
    strategies = tmp_path / "lowtide" / "strategies"
    strategies.mkdir(parents=True)
    source = Path(kernels.__file__)
    (strategies / "numerics").mkdir()
    (strategies / "numerics" / "kernels.py").write_text(source.read_text())
    for package in (strategies / "numerics", strategies, strategies.parent):
        (package / "__init__.py").touch()
    (strategies / "caller.py").write_text(
        "from lowtide.strategies.numerics.kernels import kernel\n"
        "from lowtide.strategies.numerics.callee import inner\n"
        "@kernel\ndef outer(x):\n    return inner(x)\n"
    )
    for more in (1, 2):
        (strategies / "numerics" / "callee.py").write_text(
            f"from lowtide.strategies.numerics.kernels import kernel\n@kernel\ndef inner(x):\n    return x + {more}\n"
        )
        program = "from lowtide.strategies.caller import outer; print(outer(5))"
        environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == 5 + more
