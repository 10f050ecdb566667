from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULE = """
from typing import NamedTuple
import numpy as np
from lowtide.strategies.kernels import kernel

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
