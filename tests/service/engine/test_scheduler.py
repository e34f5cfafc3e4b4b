import random

import pytest

from service.engine.scheduler import Scheduler, Waiting


def waiting(id_: int, source_tokens: int, num_rows: int = 1, expires: float = 1000) -> Waiting:
    return Waiting(id_, source_tokens, num_rows, expires)


def scheduler_of(*requests: Waiting, max_batch_tokens: int = 100) -> Scheduler:
    scheduler = Scheduler(max_batch_tokens)
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_an_empty_queue_gives_an_empty_batch() -> None:
    assert scheduler_of().next_batch(free_rows=4) == []


def test_a_lone_request_goes_at_once_and_leaves_the_queue() -> None:
    scheduler = scheduler_of(waiting(0, 5))
    assert scheduler.next_batch(free_rows=1) == [0]
    assert len(scheduler) == 0
    assert scheduler.next_batch(free_rows=1) == []


def test_a_batch_is_sorted_by_length() -> None:
    scheduler = scheduler_of(waiting(0, 7), waiting(1, 5), waiting(2, 6))
    assert scheduler.next_batch(free_rows=3) == [1, 2, 0]


def test_the_rows_go_to_the_oldest() -> None:
    scheduler = scheduler_of(waiting(0, 9), waiting(1, 5), waiting(2, 9))
    assert scheduler.next_batch(free_rows=2) == [1, 0]
    assert scheduler.next_batch(free_rows=0) == []
    assert scheduler.next_batch(free_rows=1) == [2]


def test_a_request_that_needs_more_rows_than_are_free_is_not_passed_by_later_ones() -> None:
    scheduler = scheduler_of(waiting(0, 5, num_rows=4), waiting(1, 5, num_rows=1))
    assert scheduler.next_batch(free_rows=3) == []
    assert scheduler.next_batch(free_rows=4) == [0]


def test_encode_only_requests_pass_those_that_wait_for_rows() -> None:
    scheduler = scheduler_of(waiting(0, 5), waiting(1, 5, num_rows=0), waiting(2, 6, num_rows=0))
    assert scheduler.next_batch(free_rows=0) == [1, 2]
    assert scheduler.next_batch(free_rows=1) == [0]


def test_a_batch_stays_within_the_padded_tokens() -> None:
    scheduler = scheduler_of(*(waiting(i, 10) for i in range(5)), max_batch_tokens=30)
    assert scheduler.next_batch(free_rows=9) == [0, 1, 2]
    assert scheduler.next_batch(free_rows=9) == [3, 4]


def test_a_request_longer_than_the_budget_goes_alone() -> None:
    scheduler = scheduler_of(waiting(0, 50), waiting(1, 50), max_batch_tokens=30)
    assert scheduler.next_batch(free_rows=9) == [0]
    assert scheduler.next_batch(free_rows=9) == [1]


def test_the_oldest_goes_first_with_those_nearest_to_its_length() -> None:
    scheduler = scheduler_of(waiting(0, 40), waiting(1, 2), waiting(2, 2), waiting(3, 2), waiting(4, 39))
    assert scheduler.next_batch(free_rows=9) == [4, 0]
    assert scheduler.next_batch(free_rows=9) == [1, 2, 3]


def test_at_least_half_of_a_batch_is_real() -> None:
    scheduler = scheduler_of(waiting(0, 2), waiting(1, 2), waiting(2, 2), waiting(3, 40), max_batch_tokens=1000)
    assert scheduler.next_batch(free_rows=9) == [0, 1, 2]
    assert scheduler.next_batch(free_rows=9) == [3]


def test_a_removed_request_never_goes() -> None:
    scheduler = scheduler_of(waiting(0, 5), waiting(1, 5, num_rows=0))
    assert scheduler.remove(0)
    assert not scheduler.remove(0)
    assert scheduler.next_batch(free_rows=9) == [1]


def test_requests_expire_at_their_time_oldest_first() -> None:
    scheduler = scheduler_of(
        waiting(0, 5, expires=30), waiting(1, 5, num_rows=0, expires=10), waiting(2, 5, expires=10), waiting(3, 5)
    )
    assert scheduler.remove_expired(9) == []
    assert scheduler.remove_expired(10) == [1, 2]
    assert scheduler.remove_expired(29) == []
    assert scheduler.remove_expired(31) == [0]
    assert scheduler.next_batch(free_rows=9) == [3]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_arrives_the_oldest_that_can_go_goes_within_budget_and_rows(seed: int) -> None:
    rng = random.Random(seed)
    budget = rng.choice([20, 64, 200])
    scheduler, queue = Scheduler(budget), dict[int, Waiting]()
    for id_ in range(200):
        queue[id_] = waiting(id_, rng.randint(1, 60), num_rows=rng.choice([0, 1, 1, 3]))
        scheduler.add(queue[id_])
        if rng.random() < 0.5:
            continue
        free_rows = rng.randint(0, 6)
        head = next((one for one in queue.values() if one.num_rows), None)
        can_go = [one.id for one in queue.values() if one.num_rows == 0 or (one is head and one.num_rows <= free_rows)]
        batch = [queue.pop(one) for one in scheduler.next_batch(free_rows)]
        lengths = [one.source_tokens for one in batch]
        assert bool(batch) == bool(can_go)
        if batch:
            assert min(can_go) == min(one.id for one in batch)
            assert lengths == sorted(lengths)
            assert sum(one.num_rows for one in batch) <= free_rows
            assert len(batch) == 1 or len(batch) * max(lengths) <= min(budget, 2 * sum(lengths))
        assert len(scheduler) == len(queue)
