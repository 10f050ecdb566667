import dataclasses
import json

import pytest
from tests.looping import looped
from tests.strategies.weight_brute_force import fastest_period
from tests.strategies.weight_chains import MiB, equal_chain, random_weight_chain, tiny_problem, transformer_chain

from lowtide import (
    Backward,
    Chain,
    Forward,
    InfeasibleBudgetError,
    Offload,
    Prefetch,
    Release,
    Stage,
    StrategyError,
    bound,
    simulate,
    solve,
)
from lowtide.cli import main
from lowtide.strategies.weights.bound import program_of
from lowtide.strategies.weights.periods import cyclic_schedule, period_of
from lowtide.strategies.weights.relaxation import relaxation_of


@pytest.mark.parametrize("model", ["paper", "lists"])
@looped("seed", range(0, 40, 2))
def test_no_list_of_two_stages_is_below_it(seed: int, model: str) -> None:
    problem = tiny_problem(seed, 2, optimizer=False)
    best, _ = fastest_period(problem)
    link = {"bandwidth": problem.bandwidth, "duplex": problem.duplex}
    proven = bound(problem.chain, memory_budget=problem.memory_budget, model=model, **link)
    assert proven.proven_optimal
    assert problem.chain.compute_seconds * (1 - 1e-8) <= proven.seconds <= best * (1 + 1e-12)


@pytest.mark.parametrize(
    ("seed", "num_stages", "optimizer"), [(10, 3, False), (40, 3, False), (0, 2, True), (20, 2, True)]
)
def test_no_longer_list_is_below_it(seed: int, num_stages: int, optimizer: bool) -> None:
    problem = tiny_problem(seed, num_stages, optimizer=optimizer)
    best, _ = fastest_period(problem)
    link = {"bandwidth": problem.bandwidth, "duplex": problem.duplex}
    for model in ("paper", "lists"):
        assert bound(problem.chain, memory_budget=problem.memory_budget, model=model, **link).seconds <= best


@looped("seed", range(8))
def test_no_schedule_of_ours_is_below_it(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=3 + seed % 5, optimizer=seed % 3 == 0)
    period = period_of(chain)
    budget = period.least_bytes + max(0, period.most_bytes - period.least_bytes) * (seed % 4) // 6
    link = {"bandwidth": 1 + seed % 6, "duplex": seed % 4 != 0}
    paper = bound(chain, memory_budget=budget, **link)
    lists = bound(chain, memory_budget=budget, model="lists", **link)
    assert paper.seconds <= lists.seconds * (1 + 1e-3)
    for strategy in ("weights-greedy", "weights-greedy-nodiscount", "weights-l2l"):
        solution = solve(chain, memory_budget=budget, strategy=strategy, **link)
        assert lists.seconds <= solution.seconds
        for proven in (paper, lists):  # what `solve` calls the best is never above what is proven here of such lists
            assert max(proven.seconds, solution.lower_bound_seconds) <= proven.lists_seconds <= solution.seconds
    assert lists.seconds == lists.lists_seconds


@looped("seed", range(8))
def test_both_programs_say_the_same_of_equal_weights(seed: int) -> None:
    period = period_of(equal_chain(4 + seed % 4))
    given = {"memory_budget": period.least_bytes + 10 * (seed % 3), "bandwidth": 2 + seed}
    values = []
    for write in (relaxation_of, program_of):
        program = write(period, **given)
        values.append(program.seconds(program.program.minimize(program.idle).proven))
    assert values[0] >= values[1] * (1 - 1e-4)  # summed up, and not a bit weaker


@pytest.mark.parametrize("compute_ms", [47421, 11612])
def test_the_paper_finds_no_idle_time_in_table_1(compute_ms: int) -> None:
    chain = transformer_chain(72, compute_ms / 1e3)
    proven = bound(chain, memory_budget="8GiB", bandwidth=12000 * MiB)
    assert proven.proven_optimal
    assert proven.seconds * 1e3 == pytest.approx(compute_ms, rel=1e-6)


def test_a_time_limit_gives_what_is_proven_by_then() -> None:
    chain = transformer_chain(36, 11.84)
    given = {"memory_budget": "7GiB", "bandwidth": 1000 * MiB}
    proven = bound(chain, time_limit=0.05, **given)
    assert chain.compute_seconds * (1 - 1e-8) <= proven.seconds
    assert proven.seconds <= solve(chain, strategy="weights-greedy", **given).seconds
    assert proven.proven_optimal == (proven.gap == 0.0)


# Theorem 1: a 3-partition instance x_1..x_3m with sum m V becomes a chain with T = 2m for those that have a partition.
# The proof chains m swaps inside forward 2m; a list releases nothing inside an operation, so that it is cut into m.


def partition_chain(numbers: list[int], num_parts: int) -> Chain:
    """Stages 1..2m-1 (weights V at the odd ones), m pieces of stage 2m, then one stage a number."""
    part = sum(numbers) // num_parts
    nothing = {"output_bytes": 0, "saved_bytes": 0}
    stages = []
    for i in range(1, 2 * num_parts):
        weight, backward = (part, 0.0) if i % 2 else (0, 1.0)
        stages.append(Stage(f"layer {i}", 0.0, backward, weight_bytes=weight, **nothing))
    for piece in range(num_parts):
        stages.append(Stage(f"piece {piece}", 1.0, 1.0 if piece == num_parts - 1 else 0.0, **nothing))
    stages += [Stage(f"x = {x}", 0.0, 0.0, weight_bytes=x, **nothing) for x in numbers]
    return Chain(f"3-partition of {numbers}", stages)


def schedule_of_the_proof(chain: Chain, parts: list[list[int]]) -> list:
    """`parts`: indices of numbers, from 0. Piece j brings part j and takes w[2j-1] away; backward 2k turns it round."""
    m, n = len(parts), chain.num_stages
    groups = [[3 * m - 1 + index + 1 for index in part] for part in parts]  # stages
    operations: list = [Forward(k, "all") for k in range(1, 2 * m)]
    for j in range(m):
        operations += [Prefetch("w", k) for k in groups[j]]
        operations += [Offload("w", 2 * j + 1), Forward(2 * m + j, "all"), Release("w", 2 * j + 1)]
    operations += [Forward(k, "all") for k in range(3 * m, n + 1)]
    operations += [Backward(k) for k in range(n, 3 * m - 1, -1)]
    for j in range(m):
        odd = 2 * (m - j) - 1
        operations += [Offload("w", k) for k in groups[j]]
        operations.append(Prefetch("w", odd))
        first = range(3 * m - 1, 2 * m - 1, -1) if j == 0 else [odd + 1]
        operations += [Backward(k) for k in first]
        operations += [Release("w", k) for k in groups[j]]
        operations.append(Backward(odd))
    return operations


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [
        ([3, 4, 3, 4, 3, 3], [[0, 1, 2], [3, 4, 5]]),
        ([5, 6, 7, 6, 5, 7, 6, 6, 6], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
)
def test_a_partition_gives_the_schedule_of_the_proof(numbers: list[int], parts: list[list[int]]) -> None:
    m, part = len(parts), sum(numbers) // len(parts)
    chain = partition_chain(numbers, m)
    schedule = cyclic_schedule("theorem 1", chain.num_stages, schedule_of_the_proof(chain, parts))
    trace = simulate(chain, schedule, bandwidth=part)
    assert trace.seconds == pytest.approx(2 * m)
    assert trace.idle_seconds == pytest.approx(0.0)
    assert trace.peak_bytes == (m + 1) * part
    for model in ("paper", "lists"):
        assert bound(chain, memory_budget=(m + 1) * part, bandwidth=part, model=model).seconds <= trace.seconds


def test_without_a_partition_there_is_idle_time() -> None:
    chain = partition_chain([3, 3, 3, 3, 3, 5], 2)  # no subset of these sums up to 10
    for strategy in ("weights-greedy", "weights-l2l"):
        solution = solve(chain, memory_budget=30, strategy=strategy, bandwidth=10)
        assert solution.seconds > 4.0
        assert bound(chain, memory_budget=30, bandwidth=10).seconds <= solution.seconds


def test_wrong_use_is_refused() -> None:
    chain = equal_chain(3)
    given = {"memory_budget": 100, "bandwidth": 1}
    with pytest.raises(StrategyError, match="grads_resident"):
        bound(dataclasses.replace(chain, grads_resident=True), **given)
    for wrong in ({"bandwidth": 0}, {"time_limit": 0}, {"time_limit": float("nan")}, {"gap": 1}, {"model": "none"}):
        with pytest.raises(StrategyError):
            bound(chain, **{**given, **wrong})
    with pytest.raises(InfeasibleBudgetError) as refusal:
        bound(chain, memory_budget=5, bandwidth=1)
    assert refusal.value.minimum_bytes == period_of(chain).least_bytes


def test_the_command(tmp_path, capsys) -> None:
    path = str(tmp_path / "chain.json")
    equal_chain(4).save(path)
    given = ["bound", path, "--memory", "30", "--bandwidth", "5B/s"]
    assert main([*given, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["seconds"] == pytest.approx(bound(equal_chain(4), memory_budget=30, bandwidth=5).seconds)
    assert values["proven_optimal"] is True
    assert values["gap"] == 0.0
    assert main(given) == 0
    assert "at least" in capsys.readouterr().out
    assert main(["bound", path, "--memory", "3", "--bandwidth", "5B/s"]) == 3
    assert str(period_of(equal_chain(4)).least_bytes) in capsys.readouterr().err
    assert main(["bound", path, "--memory", "3", "--bandwidth", "5B/s", "--json"]) == 3
    values = json.loads(capsys.readouterr().out)
    assert (values["seconds"], values["minimum_bytes"]) == (None, period_of(equal_chain(4)).least_bytes)
    assert main(["bound", path, "--memory", "30", "--bandwidth", "5B/s", "--model", "other"]) == 2


def test_people_see_what_is_known_of_lists_where_that_is_more(tmp_path, capsys) -> None:
    path = str(tmp_path / "chain.json")
    chain = random_weight_chain(4, num_stages=7, optimizer=False)
    chain.save(path)
    given = {"memory_budget": period_of(chain).least_bytes, "bandwidth": 5, "duplex": False}
    weaker, stronger = (
        bound(chain, **given).seconds,
        solve(chain, strategy="weights-greedy", **given).lower_bound_seconds,
    )
    assert weaker < 0.99 * stronger
    line = ["bound", path, "--memory", str(given["memory_budget"]), "--bandwidth", "5B/s", "--half-duplex"]
    assert main(line) == 0
    printed = {
        name: text.strip() for name, _, text in (row.partition("  ") for row in capsys.readouterr().out.splitlines())
    }
    assert printed["at least"].startswith(f"{weaker:.2f} s a step")
    assert printed["in lists"].startswith(f"{stronger:.2f} s a step")
    assert "'at best' of lowtide solve" in printed["in lists"]
    assert main([*line, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["seconds"] == pytest.approx(weaker)
    assert values["lists_seconds"] == pytest.approx(stronger)
