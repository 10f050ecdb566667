"""`lowtide strategies`: the table of strategies."""

from __future__ import annotations

from lowtide.cli.options import Json
from lowtide.cli.output import print_json, print_table
from lowtide.strategies.base import AUTO, AUTO_SUMMARY, REGISTRY, Entry

EXAMPLES = (
    "lowtide strategies",
    "lowtide strategies --json",
)


def command(json: Json = False) -> None:
    """List the strategies: name, what each one is, and the paper that describes it."""
    if json:
        listed = [
            {
                "name": entry.name,
                "summary": entry.summary,
                "paper": entry.paper,
                "moves": entry.moves,
                "manages_weights": entry.manages_weights,
                "executable": entry.executable,
            }
            for entry in REGISTRY.values()
        ]
        auto = {
            "name": AUTO,
            "summary": AUTO_SUMMARY,
            "paper": "-",
            "moves": True,
            "manages_weights": False,
            "executable": True,
        }
        print_json({"strategies": [*listed, auto]})
        return
    rows = [(entry.name, _described(entry)) for entry in REGISTRY.values()]
    print_table(
        ("strategy", "what it does (where it is described)"), [*rows, (AUTO, AUTO_SUMMARY)], num_left=2, wraps=1
    )


def _described(entry: Entry) -> str:
    where = "executed where asked for, or by lowtide.fit where needed" if entry.executable else "simulated only"
    summary = f"{entry.summary}; {where}" if entry.manages_weights else entry.summary
    return summary if entry.paper == "-" else f"{summary} ({entry.paper})"
