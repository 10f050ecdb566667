import pytest
from tests.looping import looped
from tests.strategies.weight_chains import random_weight_chain

from lowtide.strategies.weights.choices import choices_of, from_backward, select_greedily
from lowtide.strategies.weights.periods import period_of


def _by_the_letter(period, choices, memory_budget, discount):
    """Algorithm 1 as printed, with the layer's own weight counted once and the first of equal profits taken."""
    excess = [
        max(0, period.resident_bytes + int(s) - memory_budget) for s in from_backward(period, period.standing_bytes)
    ]
    taken: list[int] = []

    def covered(choice):
        return [position % len(excess) for position in range(choice.use + 1, choice.need)]

    while max(excess) > 0:
        profits = []
        for index, choice in enumerate(choices):
            removed = sum(min(excess[position], choice.num_bytes) for position in covered(choice))
            paid = discount and choice.partner in taken
            profits.append(-1.0 if index in taken else removed / choice.num_bytes / (1 if paid else 2))
        best = profits.index(max(profits, default=0.0)) if profits else -1
        if not profits or profits[best] <= 0:
            return None
        taken.append(best)
        for position in covered(choices[best]):
            excess[position] = max(0, excess[position] - choices[best].num_bytes)
    return taken


@pytest.mark.parametrize("discount", [True, False])
@looped("seed", range(60))
def test_it_is_algorithm_1(seed: int, discount: bool) -> None:
    chain = random_weight_chain(seed, num_stages=1 + seed % 9, optimizer=seed % 3 == 0, largest=3 if seed % 2 else 30)
    period, choices = period_of(chain), choices_of(period_of(chain))
    for share in (-1, 0, 1, 4, 8):
        budget = period.least_bytes + (period.most_bytes - period.least_bytes) * share // 8
        found = select_greedily(period, choices, budget, discount=discount)
        assert found == _by_the_letter(period, choices, budget, discount)


def test_choices_cover_what_runs_while_the_value_is_away() -> None:
    chain = random_weight_chain(3, num_stages=3, zeros=False, optimizer=True)
    named = {(c.kind, c.stage, c.clean): (c.use, c.need) for c in choices_of(period_of(chain))}
    # Positions: backward 3, 2, 1 are 0, 1, 2; forward 1, 2, 3 are 3, 4, 5.
    assert named == {
        ("w", 1, True): (3, 8),
        ("w", 2, False): (1, 4),
        ("w", 2, True): (4, 7),
        ("w", 3, False): (0, 5),
        ("opt", 1, False): (2, 8),
        ("opt", 2, False): (1, 7),
        ("opt", 3, False): (0, 6),
    }


def test_each_weight_knows_its_other_choice() -> None:
    choices = choices_of(period_of(random_weight_chain(5, num_stages=6, zeros=False, optimizer=True)))
    for index, choice in enumerate(choices):
        if choice.partner >= 0:
            other = choices[choice.partner]
            assert other.partner == index
            assert (other.kind, other.stage, other.clean) == ("w", choice.stage, not choice.clean)
    assert {choice.stage for choice in choices if choice.partner >= 0} == {2, 3, 4, 5}
