import math
import random

import pytest

from sightline.service.engine.scheduler import ROWS_WEIGHT, RowCounts, Scheduler, Turns, WaitingSequence, _Queue


def waiting(
    id_: int, source_tokens: int = 5, num_rows: int = 1, deadline: float = 1000, call: str = "", caller: str = ""
) -> WaitingSequence:
    return WaitingSequence(id_, (caller, call or str(id_)), source_tokens, num_rows, deadline)


def held(**rows: int) -> RowCounts:
    """Return the rows of calls without a caller."""
    counts = RowCounts()
    for call, num_rows in rows.items():
        counts.add(("", call), num_rows)
    return counts


def scheduler_of(*requests: WaitingSequence, max_batch_tokens: int = 100) -> Scheduler:
    scheduler = Scheduler(max_batch_tokens)
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_an_empty_queue_gives_an_empty_batch() -> None:
    assert scheduler_of().next_batch(4, held()) == []


def test_a_single_request_is_scheduled_at_once_and_removed_from_the_queue() -> None:
    scheduler = scheduler_of(waiting(0, 5))
    assert scheduler.next_batch(1, held()) == [0]
    assert len(scheduler) == 0
    assert scheduler.next_batch(1, held()) == []


def test_the_oldest_requests_get_the_rows() -> None:
    scheduler = scheduler_of(waiting(0, 9), waiting(1, 5), waiting(2, 9))
    assert scheduler.next_batch(2, held()) == [1, 0]
    assert scheduler.next_batch(0, held()) == []
    assert scheduler.next_batch(1, held()) == [2]


def test_later_requests_do_not_overtake_one_that_waits_for_rows() -> None:
    scheduler = scheduler_of(waiting(0, 5, num_rows=4), waiting(1, 5, num_rows=1))
    assert scheduler.next_batch(3, held()) == []
    assert scheduler.next_batch(4, held()) == [0]


def test_encode_only_requests_overtake_those_that_wait_for_rows() -> None:
    scheduler = scheduler_of(waiting(0, 5), waiting(1, 5, num_rows=0), waiting(2, 6, num_rows=0))
    assert scheduler.next_batch(0, held()) == [1, 2]
    assert scheduler.next_batch(1, held()) == [0]


def test_a_batch_stays_within_the_padded_tokens() -> None:
    scheduler = scheduler_of(*(waiting(i, 10) for i in range(5)), max_batch_tokens=30)
    assert scheduler.next_batch(9, held()) == [0, 1, 2]
    assert scheduler.next_batch(9, held()) == [3, 4]


def test_a_batch_is_smaller_if_fewer_tokens_are_permitted_and_never_empty() -> None:
    scheduler = scheduler_of(*(waiting(i, 10) for i in range(9)), max_batch_tokens=30)
    assert [len(scheduler.next_batch(9, held(), most)) for most in (0, 9, 29.5, 40)] == [1, 1, 2, 3]


def test_the_oldest_request_is_batched_with_those_of_similar_length() -> None:
    scheduler = scheduler_of(waiting(0, 40), waiting(1, 2), waiting(2, 2), waiting(3, 2), waiting(4, 39))
    assert scheduler.next_batch(9, held()) == [4, 0]
    assert scheduler.next_batch(9, held()) == [1, 2, 3]


def test_a_removed_request_is_never_scheduled() -> None:
    scheduler = scheduler_of(waiting(0, 5), waiting(1, 5, num_rows=0))
    assert scheduler.remove(0)
    assert not scheduler.remove(0)
    assert scheduler.next_batch(9, held()) == [1]


def test_requests_expire_at_their_time_oldest_first() -> None:
    scheduler = scheduler_of(
        waiting(0, 5, deadline=30), waiting(1, 5, num_rows=0, deadline=10), waiting(2, 5, deadline=10), waiting(3, 5)
    )
    assert scheduler.remove_expired(9) == []
    assert scheduler.remove_expired(10) == [1, 2]
    assert scheduler.remove_expired(29) == []
    assert scheduler.remove_expired(31) == [0]
    assert scheduler.next_batch(9, held()) == [3]


def order_of(scheduler: Scheduler) -> list[int]:
    """Return the order in which sequences get a single row that is repeatedly released."""
    order: list[int] = []
    while batch := scheduler.next_batch(1, RowCounts()):
        order += batch
    return order


def test_a_small_call_overtakes_the_sequences_of_a_large_one() -> None:
    """Regression: a single input waited for all sequences of twelve calls of 32 inputs."""
    large = [waiting(id_, call="large") for id_ in range(32)]
    assert order_of(scheduler_of(*large, waiting(32, call="small"))).index(32) <= 2


def test_rows_freed_at_the_same_time_are_shared_between_calls() -> None:
    large = [waiting(id_, call="large") for id_ in range(20)]
    scheduler = scheduler_of(*large, waiting(20, call="b"), waiting(21, call="c"), max_batch_tokens=1000)
    assert {20, 21} <= set(scheduler.next_batch(5, held()))


def test_a_large_call_makes_progress_while_small_ones_arrive() -> None:
    scheduler = scheduler_of(*(waiting(id_, call="large") for id_ in range(10)))
    taken: list[int] = []
    for id_ in range(10, 50):  # overload: a new call arrives for each row that is released
        scheduler.add(waiting(id_))
        taken += scheduler.next_batch(1, held(large=1))
    assert set(range(10)) <= set(taken[:20])


def test_reserved_rows_are_only_for_calls_without_rows() -> None:
    """Regression: a single input waited for the turns of all large calls."""
    scheduler = Scheduler(100, reserved_rows=2)
    for id_ in range(8):
        scheduler.add(waiting(id_, num_rows=4, call="a"))
    assert scheduler.next_batch(10, held()) == [0, 1]  # 8 rows and the reserve
    counts = {"a": 8}
    assert scheduler.next_batch(2, held(**counts)) == []
    scheduler.add(waiting(8, call="b"))
    scheduler.add(waiting(9, call="a"))
    scheduler.add(waiting(10, call="c", num_rows=2))
    assert scheduler.next_batch(2, held(**counts)) == [8]
    scheduler.add(waiting(11, call="d"))
    scheduler.add(waiting(12, call="e"))
    assert scheduler.next_batch(1, held(**counts | {"b": 1})) == [11]
    assert scheduler.next_batch(0, held(**counts | {"b": 1, "d": 1})) == []
    scheduler.on_end(8)
    assert scheduler.next_batch(1, held(**counts | {"d": 1})) == [12]


def test_a_search_gets_no_reserved_rows() -> None:
    """Regression: two searches of four beams occupied all eight reserved rows."""
    scheduler = Scheduler(100, reserved_rows=8)
    scheduler.add(waiting(0, num_rows=4, call="a"))
    scheduler.add(waiting(1, call="b"))
    assert scheduler.next_batch(8, held()) == [1]
    assert scheduler.next_batch(11, held(b=1)) == [0]


def test_other_rows_are_kept_for_the_next_call_in_turn() -> None:
    """Small calls reuse reserved rows; rows of a large call go to the next in fair order."""
    scheduler = Scheduler(100, reserved_rows=2)
    for id_ in range(3):
        scheduler.add(waiting(id_, num_rows=4, call="a"))
    assert scheduler.next_batch(6, held()) == [0]
    for id_ in range(10, 15):
        scheduler.add(waiting(id_))
    assert scheduler.next_batch(2, held(a=4)) == [10, 11]
    assert scheduler.next_batch(3, held(**{"a": 4, "10": 1, "11": 1})) == []  # three rows of four are free
    assert scheduler.next_batch(4, held(**{"10": 1, "11": 1})) == [1]


def test_a_call_alone_gets_all_rows_but_the_reserve() -> None:
    scheduler = Scheduler(1000, reserved_rows=2)
    for id_ in range(40):
        scheduler.add(waiting(id_, call="a"))
    assert len(scheduler.next_batch(32, held())) == 30


def test_encode_only_sequences_take_turns() -> None:
    large = [waiting(id_, 30, num_rows=0, call="large") for id_ in range(9)]
    scheduler = scheduler_of(*large, waiting(9, 30, num_rows=0, call="small"), max_batch_tokens=30)
    assert order_of(scheduler).index(9) <= 2


@pytest.mark.parametrize("seed", range(20))
def test_the_next_request_in_turn_is_always_scheduled_within_budget_and_rows(seed: int) -> None:
    rng = random.Random(seed)
    budget = rng.choice([20, 64, 200])
    scheduler, queue = Scheduler(budget), dict[int, WaitingSequence]()
    for id_ in range(200):
        queue[id_] = waiting(id_, rng.randint(1, 60), num_rows=rng.choice([0, 1, 1, 3]), call=rng.choice("abcdef"))
        scheduler.add(queue[id_])
        if rng.random() < 0.5:
            continue
        free_rows = rng.randint(0, 6)
        counts = {call: rng.randint(1, 9) for call in rng.sample("abcdef", 3)}
        for_encoder = [one for one in queue.values() if not one.num_rows]
        heads = dict(reversed([(one.call, one) for one in queue.values() if one.num_rows]))
        batch = [queue.pop(one) for one in scheduler.next_batch(free_rows, held(**counts))]
        lengths = [one.source_tokens for one in batch]
        if for_encoder or (heads and free_rows >= 3):
            assert batch
        if batch:
            assert lengths == sorted(lengths)
            assert sum(one.num_rows for one in batch) <= free_rows
            assert len(batch) == 1 or len(batch) * max(lengths) <= min(budget, 2 * sum(lengths))
        first_of_call = [one for one in batch if one.num_rows and heads[one.call] is one]
        assert bool(first_of_call) == any(one.num_rows for one in batch) or for_encoder
        assert len(scheduler) == len(queue)
    waited = [one.id for one in queue.values()]
    left = [id_ for _ in range(1000) for id_ in scheduler.next_batch(9, held())]
    assert sorted(left) == waited


def test_callers_share_the_rows_whatever_their_number_of_calls() -> None:
    scheduler = Scheduler(1000)
    for id_ in range(30):
        scheduler.add(waiting(id_, caller="large"))
    for id_ in range(30, 60):
        scheduler.add(waiting(id_, call="one", caller="other"))
    batch = scheduler.next_batch(20, held())
    assert sum(id_ < 30 for id_ in batch) == 11


def test_a_small_call_overtakes_all_calls_of_another_caller() -> None:
    for num_rows in (0, 1):
        calls = [waiting(id_, 30, num_rows, caller="large") for id_ in range(50)]
        scheduler = scheduler_of(*calls, waiting(50, 30, num_rows, caller="small"), max_batch_tokens=30)
        assert order_of(scheduler).index(50) <= 1 + 1


def test_half_of_the_reserved_rows_are_for_callers_without_rows() -> None:
    scheduler = Scheduler(100, reserved_rows=2)
    counts = RowCounts()
    counts.add(("a", "first"), 8)
    for id_ in range(3):
        scheduler.add(waiting(id_, caller="a"))
    assert scheduler.next_batch(2, counts) == [0]
    scheduler.add(waiting(3, caller="b"))
    counts.add(("a", "0"), 1)
    assert scheduler.next_batch(1, counts) == [3]


def slow_order(queue: _Queue, rows: RowCounts) -> list[int]:
    """Ids in fair order, with a search through all calls for each sequence."""
    rows, order, oldest_is_next = rows.copy(), [], queue._oldest_is_next
    waiting = {
        share: {call: list(of_call.values()) for call, of_call in of_share.items()}
        for share, of_share in queue._shares.items()
    }
    while waiting:
        if oldest_is_next:
            heads = [of_call[0] for of_share in waiting.values() for of_call in of_share.values()]
            one = min(heads, key=lambda head: head.id)
        else:
            share = min(waiting, key=lambda share: rows.of_share[share])
            one = waiting[share][min(waiting[share], key=lambda call: rows.of_call[call])][0]
        order.append(one.id)
        oldest_is_next = not oldest_is_next
        rows.add(one.call, one.num_rows)
        rest = waiting[one.share].pop(one.call)[1:]
        if rest:  # behind the other calls of the share
            waiting[one.share][one.call] = rest
        elif not waiting[one.share]:
            del waiting[one.share]
    return order


@pytest.mark.parametrize("seed", range(20))
def test_the_fair_order_is_that_of_a_search_through_all_calls(seed: int) -> None:
    draw = random.Random(seed)
    queue, rows, num_rows = _Queue(), RowCounts(), draw.choice([0, 1, 3])
    for id_ in range(80):
        call = str(draw.randrange(12))
        queue.add(waiting(id_, num_rows=num_rows, call=call, caller=draw.choice(["", "", "a", "b"])))
        assert [one.id for one in queue.fair_order(rows)] == slow_order(queue, rows)
        if draw.random() < 0.2:
            rows.add(draw.choice(list(queue)).call, draw.randint(1, 3))
        if draw.random() < 0.3:
            queue.take(draw.choice(list(queue.heads())))
        elif draw.random() < 0.1:
            queue.remove(draw.choice(list(queue)).id)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"a": (7.0, math.inf), "b": (0.5, math.inf)}, 1.0),
        ({"a": (7.0, 28.0), "b": (0.5, 20.0)}, 1.0),
        ({"a": (0.4, math.inf), "b": (1.0, 4.0)}, ROWS_WEIGHT),
        ({"a": (9.0, math.inf), "b": (1.0, 4.0)}, ROWS_WEIGHT),
        # No model starves beside several whose rows have always waited too long.
        ({"a": (1.0, math.inf), **dict.fromkeys("bcdefg", (2.0, 8.0))}, ROWS_WEIGHT),
    ],
)
def test_models_share_the_time_whatever_a_turn_takes(models: dict[str, tuple[float, float]], expected: float) -> None:
    """Each model has the duration of its turns and the longest time that its rows should wait."""
    turns, now, used = Turns(), 0.0, dict.fromkeys(models, 0.0)
    while now < 1000.0:
        model, limit = turns.next({name: wait for name, (_, wait) in models.items()}, now)
        seconds, wait = models[model]
        if wait == math.inf > limit:  # a model without rows uses the time that it may
            seconds *= max(1, limit // seconds)
        now += seconds
        turns.end(now)
        used[model] += seconds
    assert used["a"] / used["b"] == pytest.approx(expected, rel=0.15)


def test_rows_whose_own_turn_was_long_do_not_wait_until_others_had_as_much_time() -> None:
    turns = Turns()
    assert turns.next({"rows": math.inf, "encoder": math.inf}, 0.0)[0] == "rows"
    now, order = 6.0, list[str]()  # after the chunk of a prompt, whose row runs from now on
    for _ in range(9):
        turns.end(now)
        model, _ = turns.next({"rows": 4.0, "encoder": math.inf}, now)
        order.append(model)
        now += 1.0 if model == "rows" else 3.0
    assert order[:4] == ["encoder", "rows", "encoder", "rows"]  # not the encoder twice
    assert order.count("encoder") == 4  # its time comes later


def test_a_model_that_had_no_work_gets_no_compensation() -> None:
    turns, order = Turns(), list[str]()
    for now, models in enumerate(["a"] * 100 + ["ab"] * 6):
        order.append(turns.next(dict.fromkeys(models, math.inf), now)[0])
        turns.end(now + 1)
    assert sorted(order[-6:]) == ["a"] * 3 + ["b"] * 3
