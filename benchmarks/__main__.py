"""Every benchmark that needs no GPU, one after the other: `make bench`, or `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.refusing import Parser

NAMES = ("startup", "selection", "solvers", "pofo", "weights")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"only these: {', '.join(NAMES)}")
    chosen = parser.parse_args().names or NAMES
    for name in chosen:
        if name not in NAMES:
            print(f"unknown benchmark {name!r}; expected one of {', '.join(NAMES)}", file=sys.stderr)
            return 2
    failed = []
    for name in chosen:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
