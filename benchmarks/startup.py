"""How long `import lowtide` and `lowtide --help` take, process included.

    python -m benchmarks.startup

The reach is 0.3 s for each; a bare interpreter is shown for comparison.
"""

from __future__ import annotations

import subprocess
import sys
import time

NUM_CALLS = 10
REACH_SECONDS = 0.3

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import lowtide": ["-c", "import lowtide"],
    "lowtide --help": ["-m", "lowtide", "--help"],
    "lowtide solve --help": ["-m", "lowtide", "solve", "--help"],
}


def main() -> None:
    for name, arguments in COMMANDS.items():
        seconds = []
        for _ in range(NUM_CALLS):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
        print(f"{name:22} {min(seconds):6.3f} s   (reach {REACH_SECONDS} s)")


if __name__ == "__main__":
    main()
