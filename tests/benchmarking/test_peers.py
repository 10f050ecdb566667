"""The peers' benchmark: what it concludes from rows, and a whole run on a CPU in small."""

import argparse
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
import torch
from benchmarks import harness, peer_batches, peer_compiling, peers
from benchmarks.peer_claim import NOISE, NOISE_OF_PEAKS, Row, best_of, claim_lines, verdicts
from benchmarks.peer_networks import Network
from benchmarks.peer_run import Batches, batch_lines
from benchmarks.peer_ways import compiled_whole
from torch import nn

from lowtide.runtime.fitting.largest import Search

pytestmark = pytest.mark.usefixtures("unrendered")


def row(way: str, family: str, seconds: float | None, peak_bytes: int | None, **more) -> Row:
    return Row("n", way, family, seconds=seconds, peak_bytes=peak_bytes, **more)


def test_the_claim_compares_at_equal_memory_and_at_equal_time():
    rows = [
        row("peer", "peer", 2.0, 100),
        row("a", "lowtide", 1.5, 101),  # too large to count at its memory, beyond noise, but no slower
        row("b", "lowtide", 1.8, 90),
        row("c", "lowtide compiled", 1.9, 60),
        row("d", "lowtide", 2.5, 40),  # too slow to count at its time
    ]
    (verdict,) = verdicts(rows)
    assert verdict.at_its_memory is rows[2]
    assert verdict.slower == pytest.approx(-0.1)
    assert verdict.at_its_time is rows[3]
    assert verdict.larger == pytest.approx(-0.4)
    assert verdict.holds


def test_the_claim_fails_by_as_much_as_it_fails():
    rows = [row("fast", "peer", 1.0, 100), row("own", "lowtide", 1.1, 80), row("all", "lowtide", 1.0, 120)]
    (verdict,) = verdicts(rows)
    assert not verdict.holds_at_its_memory
    assert verdict.slower == pytest.approx(0.1)
    assert not verdict.holds_at_its_time
    assert verdict.larger == pytest.approx(0.2)
    assert "+10.0%" in "\n".join(claim_lines(rows))
    assert "Both hold for 0 of 1" in claim_lines(rows)[-1]


def test_where_lowtide_is_never_so_lean_or_so_fast_the_claim_fails():
    rows = [row("lean", "peer", 1.0, 10), row("own", "lowtide", 5.0, 50)]
    (verdict,) = verdicts(rows)
    assert verdict.at_its_memory is None
    assert verdict.at_its_time is None
    assert not verdict.holds
    text = "\n".join(claim_lines(rows))
    assert "the leanest takes +400.0%" in text
    assert "the fastest takes +400.0%" in text


def test_less_than_the_noise_is_no_difference_and_what_was_not_measured_does_not_count():
    rows = [row("peer", "peer", 1.0, 100), row("own", "lowtide", 1.0 + NOISE / 2, 90), row("oom", "peer", None, None)]
    (verdict,) = verdicts(rows)
    assert verdict.holds
    rows[1].peak_bytes = 100 * (1 + NOISE_OF_PEAKS / 2)
    (verdict,) = verdicts(rows)
    assert verdict.holds
    rows[1].peak_bytes = 100 * (1 + NOISE_OF_PEAKS * 2)
    (verdict,) = verdicts(rows)
    assert verdict.larger == pytest.approx(NOISE_OF_PEAKS * 2)
    assert not verdict.holds_at_its_time


def test_budgets_are_the_peers_peaks_each_once():
    rows = [
        row("x", "peer", 1.0, 1004),
        row("plain, eager", "peer", 1.0, 1000),
        row("y", "peer", 1.0, 500),
        row("z", "peer", 1.0, 300, compiled=True),
        row("own", "lowtide", 1.0, 50),
    ]
    assert peers.budgets_from(rows, compiled=False, shares=(0.5, 0.2)) == [1002, 500, 200]
    assert peers.budgets_from(rows, compiled=True, shares=(0.5,)) == [300]  # nothing compiled is plain


class Broken(nn.Module):
    """Is not one graph: what Dynamo compiles is its inner function."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.inner(x)

    def inner(self, x):
        return self.layers(x).sum()


def test_each_memory_budget_of_the_compiler_is_compiled_anew():
    model, x, saved = Broken(), torch.randn(64, 8), []
    for memory_budget in (1.0, 0.0):
        sizes: list[int] = []
        with (
            compiled_whole(model, "aot_eager_decomp_partition", memory_budget) as call,
            torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t),
        ):
            call(x=x)
        saved.append(sum(sizes))
    assert saved[1] < saved[0]


def test_a_curve_goes_through_what_nothing_beats():
    points = [(3.0, 1.0), (1.0, 4.0), (2.0, 5.0), (2.0, 2.0), (4.0, 1.0)]
    assert best_of(points) == [(1.0, 4.0), (2.0, 2.0), (3.0, 1.0)]


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 16, 17, 100])
@pytest.mark.parametrize("start", [1, 4, 50])
def test_the_largest_batch_is_found_to_within_one_in_sixteen(limit, start):
    found = Search(lambda size: size <= limit).run(start)
    assert found <= limit
    assert limit - found <= max(0, limit // 16)


def test_a_good_guess_of_the_largest_batch_takes_few_trials():
    tried = []
    Search(lambda size: tried.append(size) or size <= 650).run(620)
    assert len(tried) <= 3


@pytest.mark.parametrize(("low", "high"), [(613, 660), (0, 660), (613, None), (649, 651), (0, 651)])
def test_a_search_goes_on_between_what_is_known(low, high):
    tried = []
    search = Search(lambda size: tried.append(size) or size <= 650, low, high)
    found = search.run(613)
    assert found <= 650 < search.high
    assert search.high - found <= max(1, found // 16)
    assert all(low < size < (high or 10**9) for size in tried)


def test_a_search_begins_where_another_limit_lets_expect_its_end(tmp_path, monkeypatch):
    tried: list[int] = []

    def trains(run, network, way, limit_bytes, batch_size):
        tried.append(batch_size)
        return batch_size <= 100 * limit_bytes // 2**20

    monkeypatch.setattr(peer_batches, "trains", trains)
    given = ["--tiny", "--device", "cpu", "--only", "gpt", "--largest-batch", "--ways", "plain"]
    peers.main([*given, "--limits", "1MiB", "--output", str(tmp_path)])
    tried.clear()
    written = tmp_path / "peers-tiny-cpu.json"
    peers.main([*given, "--limits", "1MiB", "8MiB", "--output", str(tmp_path), "--resume", str(written)])
    assert min(tried) > 700
    assert len(tried) <= 3


def test_a_search_that_is_cut_leaves_what_it_saw_and_is_gone_on_with(tmp_path, monkeypatch):
    tried = []

    def cut_at(trial):
        def trains(run, network, way, limit_bytes, batch_size):
            tried.append(batch_size)
            if len(tried) == trial:
                raise harness.OutOfTimeError
            return batch_size <= 7

        tried.clear()
        monkeypatch.setattr(peer_batches, "trains", trains)

    cut_at(2)
    given = ["--tiny", "--device", "cpu", "--only", "gpt", "--largest-batch", "--limits", "1MiB", "--ways", "plain"]
    peers.main([*given, "--output", str(tmp_path)])
    written = tmp_path / "peers-tiny-cpu.json"
    (entry,) = (Batches(**values) for values in json.loads(written.read_text())["largest_batches"])
    assert (entry.batch, entry.is_known, entry.too_large) == (4, False, None)
    assert "at least 4 |" in "".join(batch_lines([entry]))
    cut_at(4)
    peers.main([*given, "--output", str(tmp_path), "--resume", str(written)])
    (entry,) = (Batches(**values) for values in json.loads(written.read_text())["largest_batches"])
    assert (entry.batch, entry.is_known, entry.too_large) == (6, False, 8)
    assert "at least 6, not 8 |" in "".join(batch_lines([entry]))
    cut_at(0)
    peers.main([*given, "--output", str(tmp_path), "--resume", str(written)])
    (entry,) = (Batches(**values) for values in json.loads(written.read_text())["largest_batches"])
    assert (entry.batch, entry.is_known, tried) == (7, True, [7])


def test_a_name_that_no_network_has_replaces_no_results(tmp_path):
    with pytest.raises(SystemExit):
        peers.main(["--tiny", "--device", "cpu", "--only", "nosuch", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_run(tmp_path):
    """Begins runs whose rows take no time."""
    arguments = argparse.Namespace(
        seconds=60.0,
        output=tmp_path,
        tiny=True,
        memory_budgets=[],
        shares=[],
        segments=None,
        variants="off",
        regions="off",
        graphs=False,
    )
    return lambda resume=None: peers.Run(argparse.Namespace(**vars(arguments), resume=resume), torch.device("cpu"))


def way_of(run: peers.Run, network: str, name: str, seconds: float | None = 1.0) -> Row | None:
    """Measure a row; None: it fails."""

    def measured(row: Row) -> None:
        if seconds is None:
            raise ValueError("no room")
        row.seconds, row.peak_bytes = seconds, 1

    return run.row(Row(network, name, "lowtide compiled", compiled=True), "lowtide compiled", measured)


def test_a_first_row_that_takes_long_does_not_keep_further_ones_of_its_network_from_being_measured(small_run):
    run = small_run()
    assert way_of(run, "a", "within 3") is not None
    run.guess_seconds["lowtide compiled"] = 3600.0  # what compiling took
    assert way_of(run, "a", "within 2") is not None
    for _ in range(2):
        assert way_of(run, "b", "within 2") is None
    assert run.skipped == ["b: within 2"]


def test_what_could_not_be_measured_stays_until_it_is_tried_again(small_run, tmp_path):
    run = small_run()
    way_of(run, "a", "within 2", None)
    way_of(run, "b", "within 2", None)
    assert way_of(run, "a", "within 2", 2.0) is None  # once in a run
    again = small_run(tmp_path / "peers-tiny-cpu.json")
    way_of(again, "a", "within 2", 3.0)
    written = json.loads((tmp_path / "peers-tiny-cpu.json").read_text())
    assert [(row["network"], row["seconds"], row["note"]) for row in written["rows"]] == [
        ("b", None, "ValueError: no room"),
        ("a", 3.0, ""),
    ]


def test_the_clock_refuses_what_would_not_end_and_ends_what_does_not():
    clock = harness.Clock(0.05)
    assert not clock.allows(1.0)
    with pytest.raises(harness.OutOfTimeError), clock.enforced():
        time.sleep(60)
    assert harness.Clock(None).allows(1e9)


def test_the_command_is_kept_without_folders(monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--seconds", "9", "--output", "/a/b", "--only", "gpt", "--resume", "/c.json"])
    assert harness.machine_facts(torch.device("cpu"))["command"].endswith(" --seconds 9 --only gpt")


@pytest.mark.slow
def test_a_run_in_small_and_what_it_writes(tmp_path, monkeypatch):
    budgets_from = peers.budgets_from
    monkeypatch.setattr(peers, "budgets_from", lambda *rows, **how: budgets_from(*rows, **how)[:1])
    given = ["--tiny", "--device", "cpu", "--only", "gpt", "--output", str(tmp_path)]
    peers.main([*given, "--passes", "eager", "--shares", "0.9", "--segments", "2"])
    path = tmp_path / "peers-tiny-cpu.json"
    eager = json.loads(path.read_text())["rows"]
    assert eager[-1]["way"] == "lowtide within the least"
    # going on with it measures nothing again
    going_on = ["--passes", "eager", "compiled", "--shares", "--memory-budgets", "--variants", "off"]
    peers.main([*given, *going_on, "--segments", "2", "--resume", str(path)])
    written = json.loads(path.read_text())
    assert written["rows"][: len(eager)] == eager
    assert {"machine", "torch", "date"} <= set(written["facts"])
    rows = [Row(**values) for values in written["rows"]]
    assert [r.way for r in rows if not r.is_measured] == []
    assert [r.family for r in rows[len(eager) :]] == ["peer", "lowtide compiled"]
    assert {r.family for r in rows} == {"peer", "lowtide", "lowtide compiled"}
    assert all(r.peak_bytes <= r.budget_bytes for r in rows if r.budget_bytes)
    assert "Claim: " in (tmp_path / "peers-tiny-cpu.md").read_text()
    assert (tmp_path / "peers-tiny-cpu.png").exists()


class _DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.rand(())

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(())


@pytest.mark.parametrize(("call", "draws"), [(nn.Dropout(), False), (_DrawsInBackward.apply, True)])
def test_a_peer_that_draws_random_numbers_anew_is_noticed(call, draws):
    model = nn.Linear(4, 4)
    assert harness.draws_in_backward(lambda x: call(model(x)).sum(), model, {"x": torch.ones(2, 4)}) == draws


class _Started:
    """A process that ends when it is looked at for the second time; those for a network called slow never do."""

    def __init__(self, command: list[str], env: dict[str, str], stderr: TextIO, **_: object) -> None:
        self.network, self.way = command[-2:]
        self.command, self.looks = command, 0
        self.pid, self.waited = id(self), False
        self.returncode = 1 if (self.network, self.way) == ("one", "0.5") else 0
        stderr.write("Traceback ...\nOutOfMemoryError: no room\n")
        cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        cache.mkdir()
        (cache / f"{self.network} {self.way}").touch()

    def poll(self) -> int | None:
        self.looks += 1
        return self.returncode if self.looks > 1 and self.network != "slow" else None

    def communicate(self) -> tuple[str, None]:
        self.waited = True
        if self.returncode or (self.network == "slow" and self.way != "1"):
            return "anything\n", None
        return f'anything\n{{"seconds": {30 if self.way == "lowtide" else 20}}}\nmore\n', None


def test_ways_are_compiled_side_by_side_and_ended_in_time(monkeypatch, capsys, tmp_path):
    started, killed, most = [], [], []

    def popen(command, **options):
        started.append(_Started(command, **options))
        most.append(sum(each.looks < 2 or each.network == "slow" for each in started))
        return started[-1]

    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)
    monkeypatch.setattr(peer_compiling, "time", clock)
    monkeypatch.setattr(peer_compiling, "subprocess", SimpleNamespace(Popen=popen, PIPE=None))
    monkeypatch.setattr(peer_compiling.os, "killpg", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(peer_compiling, "cache_dir", lambda: tmp_path)
    networks = [Network(name, f"network {name}", None, None, 0) for name in ("one", "slow")]
    ways = peer_compiling.ways_of(networks, [0.5, 1.0])
    found = peer_compiling.compile_side_by_side(ways, 3, ["--device", "cpu"], until=100.0)
    assert [(each.network, each.way) for each in started] == [
        *(("one", "lowtide"), ("one", "1"), ("slow", "lowtide"), ("slow", "1")),
        *(("one", "0.5"), ("slow", "0.5")),
    ]
    assert max(most) <= 3
    assert killed == [each.pid for each in started if each.network == "slow"]
    assert all(each.waited for each in started if each.network == "slow")
    assert all(each.command[3:5] == ["--device", "cpu"] for each in started)
    assert [(entry.network, entry.way, entry.seconds) for entry in found] == [
        ("network one", "lowtide", 30),
        ("network one", "1", 20),
        ("network slow", "1", 20),  # it was done with what is compared
    ]
    assert "| network one | 20.00 s | 30.00 s | 1.50 |" in peer_compiling.cold_lines(found)
    # what one that failed, or was ended, has compiled is of use all the same
    assert {path.name for path in tmp_path.iterdir()} == {f"{each.network} {each.way}" for each in started}
    printed = capsys.readouterr().out
    assert "one, 0.5: not compiled; OutOfMemoryError: no room" in printed
    assert "slow, lowtide: not compiled; ended, the time was over" in printed


@pytest.mark.parametrize(
    ("graphs", "compiled"),
    [(False, ["lowtide", "0.5"]), (True, ["lowtide", "1", "0.5"])],  # graphs are compiled for besides
)
def test_what_was_compiled_before_is_not_compiled_again(graphs, compiled, monkeypatch):
    asked, network = [], Network("one", "network one", None, None, 0)

    def compiling(ways, _, options, __):
        assert ("--graphs" in options) == graphs
        asked.extend(way for _, way in ways)
        return [peer_compiling.Cold("network one", "0.5", 30.0)]

    monkeypatch.setattr(peers, "compile_side_by_side", compiling)
    before = peer_compiling.Cold("network one", "1", 20.0)
    run = SimpleNamespace(cold=[before], memory_budgets=[0.5], graphs=graphs)
    arguments = SimpleNamespace(
        device="cpu", variants="on", regions=None, graphs=graphs, tiny=True, side_by_side=2, seconds=None
    )
    peers.compile_first(run, [network], arguments)
    assert asked == compiled
    assert len(run.cold) == (1 if graphs else 2)  # what setting up takes is compared without graphs


def test_rows_with_graphs_are_rows_of_their_own_with_what_graphs_reserve(monkeypatch):
    given, rows = [], {}
    network = Network("one", "network one", None, None, 0)
    run = SimpleNamespace(memory_budgets=[], shares=(), backend="inductor", graphs=True, device=torch.device("cuda"))
    run.compiled = {"compile_stages": True, "cuda_graphs": True}
    known = [row("plain, compiled", "peer", 1.0, 100, compiled=True), row("plain, eager", "peer", 2.0, 200)]
    run.of = lambda _: known  # of a run that this one continues

    def measured(row, kind, measure):
        measure(row)
        rows[row.way] = row.peak_bytes

    class Plan:
        schedule, notes = SimpleNamespace(strategy="rotor"), ()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def stats(self):
            return SimpleNamespace(predicted_seconds=1.0, predicted_peak_bytes=80, measured_peak_bytes=90)

    run.row = measured
    timed = harness.Timed(1.0, 0.0, 70, 5)
    monkeypatch.setattr(peers, "measure_peer", lambda run, model, batch, way, row: given.append(way))
    monkeypatch.setattr(peers, "compiled_whole", lambda *_, graphs: graphs)
    monkeypatch.setattr(peers.harness, "reserved_bytes", lambda _: 120)
    monkeypatch.setattr(peers.harness, "time_steps", lambda *_: timed)
    monkeypatch.setattr(peers.lowtide, "fit", lambda *_, cuda_graphs, **__: given.append(cuda_graphs) or Plan())
    peers.compiled_pass(run, network, (nn.Linear(1, 1), {}))
    assert given == [True, True]
    assert rows == {"plain, compiled, graphs": 120, "lowtide compiled, graphs, within 100 B": 90}
    given.clear()
    rows.clear()
    monkeypatch.setattr(peers, "eager_peers", lambda *_: {})
    peers.eager_pass(run, network, (nn.Linear(1, 1), {}))
    assert given == [True]
    assert rows == {"lowtide, graphs, within 200 B": 90}


@pytest.mark.parametrize(("command", "given"), [(peers.main, []), (peer_compiling.main, ["gpt", "lowtide"])])
def test_graphs_are_refused_without_a_device_that_has_them(command, given, capsys):
    with pytest.raises(SystemExit) as ended:
        command(["--tiny", "--device", "cpu", "--graphs", *given])
    assert ended.value.code == 2
    assert "--graphs needs a CUDA device, and --device is cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("network", "way", "said"),
    [
        ("resnet", "lowtide", "invalid choice: 'resnet'"),
        ("gpt", "half", "'half' is not a number from 0 to 1"),
        ("gpt", "1.5", "'1.5' is not a number from 0 to 1"),
        ("swin", "1", "swin has no tiny form; those that have one are gpt"),
    ],
)
def test_wrong_names_of_processes_are_refused(network, way, said, capsys):
    with pytest.raises(SystemExit) as ended:
        peer_compiling.main(["--tiny", network, way])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_some_of_the_processes_in_small(capsys, monkeypatch):
    budgets, fit = [], peer_compiling.lowtide.fit
    monkeypatch.setattr(
        peer_compiling.lowtide,
        "fit",
        lambda *given, **more: budgets.append(more["memory_budget"]) or fit(*given, **more),
    )
    for way in ("lowtide", "0.5"):
        peer_compiling.main(["--tiny", "--device", "cpu", "gpt", way])
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["seconds"] > 0
    assert len(budgets) == 2  # first with room for everything, then with what the whole model takes at that ratio
    assert budgets[1] < 2**24 < budgets[0]


@pytest.mark.slow
def test_a_run_that_is_cut_leaves_valid_results(tmp_path):
    given = ["--tiny", "--device", "cpu", "--only", "gpt", "--passes", "eager"]  # a compiler that is cut off aborts
    peers.main([*given, "--seconds", "0.5", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "peers-tiny-cpu.json").read_text())
    assert written["skipped"]


@pytest.mark.slow
def test_the_largest_batches_in_small(tmp_path, monkeypatch):
    ways = peer_batches.ways_of
    few = ("plain, eager", "lowtide")
    monkeypatch.setattr(peer_batches, "ways_of", lambda *given: {name: ways(*given)[name] for name in few})
    given = ["--tiny", "--device", "cpu", "--only", "gpt", "--largest-batch", "--limits", "512KiB"]
    peers.main([*given, "--output", str(tmp_path)])
    batches = json.loads((tmp_path / "peers-tiny-cpu.json").read_text())["largest_batches"]
    by_way = {entry["way"]: entry["batch"] for entry in batches}
    assert by_way["lowtide"] > by_way["plain, eager"] > 0
    assert all(Batches(**entry).is_known for entry in batches)
