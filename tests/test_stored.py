"""What is on the device while a schedule is simulated."""

from lowtide.stored import GRADIENTS, IN_FLIGHT, SAVED, WEIGHTS, Stored


def test_bytes_follow_their_values():
    stored = Stored()
    stored.put(("abar", 1), 10)
    stored.put(("w", 1), 3)
    stored.put(("delta", 2), 4)
    stored.add_gradients(5)
    assert stored.total_bytes == sum(stored.by_category) == 22
    assert (stored.by_category[SAVED], stored.by_category[WEIGHTS], stored.by_category[GRADIENTS]) == (10, 3, 9)
    stored.depart(("abar", 1))
    assert stored.is_in_flight(("abar", 1))
    assert (stored.by_category[SAVED], stored.by_category[IN_FLIGHT]) == (0, 10)
    stored.settle(("abar", 1))
    assert not stored.is_in_flight(("abar", 1))
    stored.take(("abar", 1))
    assert ("abar", 1) not in stored
    assert stored.total_bytes == 12


def test_a_new_round_keeps_some_kinds():
    stored = Stored()
    for value in (("a", 1), ("w", 1), ("opt", 2)):
        stored.put(value, 7)
    stored.restart({"w"}, base_bytes=100, gradient_bytes=20)
    assert list(stored) == [("w", 1)]
    assert stored[("w", 1)] == 7
    assert stored.total_bytes == sum(stored.by_category) == 127
