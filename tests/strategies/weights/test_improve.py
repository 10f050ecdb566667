from tests.looping import looped
from tests.strategies.weight_chains import MiB, random_weight_chain, transformer_chain

from lowtide import simulate, solve
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.weights.choices import choices_of, select_greedily
from lowtide.strategies.weights.improve import _selection_of, improve, is_close
from lowtide.strategies.weights.periods import cyclic_schedule, period_of
from lowtide.strategies.weights.transfers import place


def _problem(chain, memory_budget, bandwidth, duplex=True):
    def evaluate(schedule):
        return simulate(chain, schedule, bandwidth=bandwidth, duplex=duplex)

    return Problem(chain, memory_budget, bandwidth, duplex, evaluate)


@looped("seed", range(12))
def test_it_is_faster_or_nothing(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=3 + seed % 6, optimizer=seed % 3 == 0)
    period = period_of(chain)
    budget = period.least_bytes + (period.most_bytes - period.least_bytes) * (seed % 4) // 5
    problem = _problem(chain, budget, 1 + seed % 5, duplex=seed % 4 != 0)
    given = {"memory_budget": budget, "bandwidth": problem.bandwidth, "duplex": problem.duplex}
    greedy = solve(chain, strategy="weights-greedy", **given)
    better = improve(problem, Answer(greedy.schedule, None, greedy.lower_bound_seconds), greedy.seconds)
    if better is not None:
        trace = problem.evaluate(better.schedule)
        assert trace.seconds < greedy.seconds
        assert trace.peak_bytes <= budget
        assert greedy.lower_bound_seconds <= trace.seconds


@looped("seed", range(12))
def test_a_schedule_gives_back_its_selection(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=3 + seed % 6, zeros=False, optimizer=seed % 2 == 0)
    period, choices = period_of(chain), choices_of(period_of(chain))
    budget = period.least_bytes + (period.most_bytes - period.least_bytes) // 3
    taken = select_greedily(period, choices, budget)
    placed = place(period, [choices[i] for i in taken], memory_budget=budget, bandwidth=1000)
    assert placed is not None
    answer = Answer(cyclic_schedule("test", period.num_stages, placed.operations))
    # What had no time to leave stays: the schedule may make fewer moves than were chosen, never others.
    assert set(_selection_of(period, answer)) <= {choices[i] for i in taken}
    assert _selection_of(period, answer)


def test_auto_improves_the_greedy_answer() -> None:
    chain = transformer_chain(36, 11.84)
    given = {"memory_budget": "8GiB", "bandwidth": 2000 * MiB}
    greedy, best = solve(chain, strategy="weights-greedy", **given), solve(chain, manage_weights=True, **given)
    assert not is_close(Answer(greedy.schedule, None, greedy.lower_bound_seconds), greedy.seconds)
    assert best.seconds < greedy.seconds
    assert best.lower_bound_seconds <= best.seconds <= 1.01 * best.lower_bound_seconds
    assert best.details["greedy_seconds"] == greedy.seconds
