from __future__ import annotations

import json
from pathlib import Path

import pytest
from papers.pofo.__main__ import main
from papers.pofo.conclusions import findings
from papers.pofo.experiment import ALGORITHMS, Point, memory_range, scaled
from tests.chains import long_chain, random_chain

import lowtide

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "chains" / "h200" / "inception_v3-b16-500.json"


def point(alpha: float, overheads: dict[str, float | None], *, figure: int = 2, bandwidth: int = 12) -> Point:
    seconds = {name: None if (share := overheads[name]) is None else 1 + share for name in ALGORITHMS}
    return Point("net", figure, alpha, bandwidth, 10 + int(100 * alpha), 0, 110, 1.0, seconds, seconds["pofo"])


def as_the_paper_says() -> list[Point]:
    none: dict[str, float | None] = dict.fromkeys(ALGORITHMS, 0.0)
    low = none | {"rotor": 0.4, "offload": 1.5, "opportunist": None, "autocapper": 0.3, "pofo": 0.15}
    middle = none | {"rotor": 0.2, "offload": 0.3, "opportunist": 0.18, "autocapper": 0.12, "pofo": 0.1}
    high = none | {"rotor": 0.05, "opportunist": 0.04}
    return [
        point(0.1, low),
        point(0.5, middle),
        point(0.75, high),
        point(0.2, low, figure=3),
        point(0.2, low | {"offload": 0.0, "pofo": 0.0, "autocapper": 0.0}, figure=3, bandwidth=36),
    ]


def test_quick_figures_of_a_measured_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(EXAMPLE), "--quick", "--setting", "h200", "--output", str(tmp_path)])
    values = json.loads((tmp_path / "h200.json").read_text())
    assert {"machine", "torch", "lowtide", "date", "command"} <= set(values["facts"])
    assert {entry["figure"] for entry in values["points"]} == {2, 3}
    assert all(set(entry["seconds"]) == set(ALGORITHMS) for entry in values["points"])
    assert (tmp_path / "h200.md").read_text() == capsys.readouterr().out
    for figure in (2, 3):
        drawn = (tmp_path / f"h200-figure-{figure}.svg").read_text()
        assert drawn.startswith("<?xml")
    verdicts = {entry["number"]: entry["verdict"] for entry in values["conclusions"]}
    assert verdicts["3a"] == "holds"

    other = long_chain(5)
    other.save(tmp_path / "other.json")
    main([str(tmp_path / "other.json"), "--quick", "--setting", "h200", "--keep", "--output", str(tmp_path)])
    both = json.loads((tmp_path / "h200.json").read_text())["points"]
    assert {entry["network"] for entry in both} == {other.name, "inception_v3-b16-500"}
    assert [entry for entry in both if entry["network"] != other.name] == values["points"]


@pytest.mark.parametrize("options", [["--quick"], []])
def test_figures_of_a_trial_never_lie_where_those_worth_keeping_do(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("papers.pofo.__main__.HERE", tmp_path / "beside")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    long_chain(3).save(tmp_path / "other.json")
    main([str(tmp_path / "other.json"), *options, "--setting", "h200"])
    (written,) = tmp_path.rglob("h200.json")
    assert not (tmp_path / "beside").exists()
    assert f"written to {written.parent}" in capsys.readouterr().err


def test_the_conclusions_hold_on_points_made_as_the_paper_says() -> None:
    assert {found.number: found.verdict for found in findings(as_the_paper_says())} == dict.fromkeys(
        ("1a", "1b", "2a", "2b", "2c", "3a", "3b", "3c", "4a", "4b", "5a", "5b"), "holds"
    )


@pytest.mark.parametrize(
    ("number", "alpha", "changed"),
    [
        ("1a", 0.75, {"offload": 0.06}),
        ("1b", 0.1, {"offload": 0.39}),
        ("2a", 0.5, {"opportunist": 0.21}),
        ("2b", 0.1, {"opportunist": 0.5}),
        ("2c", 0.75, {"autocapper": 0.04}),
        ("3a", 0.5, {"pofo": 0.21}),
        ("3b", 0.1, {"autocapper": 0.15}),
        ("3c", 0.1, {"autocapper": 0.1}),
        ("5a", 0.1, {"pofo": 0.25}),
        ("5b", 0.1, {"pofo": 0.35}),
    ],
)
def test_each_conclusion_can_fail(number: str, alpha: float, changed: dict[str, float]) -> None:
    points = as_the_paper_says()
    index = next(k for k, own in enumerate(points) if own.figure == 2 and own.alpha == alpha)
    overheads = {name: points[index].overhead(name) for name in ALGORITHMS}
    points[index] = point(alpha, overheads | changed)
    verdicts = {found.number: found.verdict for found in findings(points)}
    assert verdicts[number] != "holds"


def test_figure_3_can_contradict_too() -> None:
    points = [own for own in as_the_paper_says() if own.figure == 2]
    slow = {**dict.fromkeys(ALGORITHMS, 0.1), "rotor": 0.4}
    points += [point(0.2, slow, figure=3), point(0.2, slow, figure=3, bandwidth=36)]
    verdicts = {found.number: found.verdict for found in findings(points)}
    assert verdicts["4a"] == verdicts["4b"] == "does not hold"


def test_a_slower_device_has_longer_times_and_the_same_bytes() -> None:
    for chain in (long_chain(6), random_chain(3, 5, features=("variants",))):
        slower = scaled(chain, 3.0)
        assert slower.compute_seconds == pytest.approx(3 * chain.compute_seconds)
        assert memory_range(slower) == memory_range(chain)
        low, high = memory_range(chain)
        ours = lowtide.solve(slower, memory_budget=(low + high) // 2, strategy="rotor").seconds
        assert ours == pytest.approx(
            3 * lowtide.solve(chain, memory_budget=(low + high) // 2, strategy="rotor").seconds
        )
