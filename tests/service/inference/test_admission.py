import asyncio
import threading
from unittest.mock import AsyncMock

import pytest

from sightline.service.api_errors import ApiError
from sightline.service.engine.throughput import Throughput
from sightline.service.inference.admission import (
    AdmissionController,
    RejectionPacer,
    ResponseMemory,
    ResponseReservation,
)
from sightline.service.inference.generate import expected_work
from sightline.service.parameters import FORCED, GenerateParameters


def controller(
    max_sequences: int = 1000, max_bytes: int = 10**6, max_tokens: int = 10**6, units_per_s: float | None = None
) -> AdmissionController:
    throughput = Throughput()
    throughput.units_per_s = units_per_s
    return AdmissionController(max_sequences, max_bytes, max_tokens, throughput, max_wait_s=5.0)


def test_sequences_beyond_the_limit_are_rejected_and_not_counted() -> None:
    admission = controller(max_sequences=4)
    admission.reserve(3, 10)  # alone, it gets half of the limit
    message = r"2 of 4 sequences are running or waiting .*, and a call of 2 needs space for 3"
    with pytest.raises(ApiError, match=message) as rejected:
        admission.reserve(2, 10)
    assert rejected.value.limit == "waiting_sequences"
    assert (admission.num_sequences, admission.num_bytes) == (2, 10)
    admission.reserve(1, 10)


def test_bytes_beyond_the_limit_are_rejected() -> None:
    admission = controller(max_bytes=100)
    admission.reserve(1, 60)  # alone, it counts as half of the limit
    message = r"50 bytes of request bodies are held, and 60 more exceed the limit of 100 \(16 MiB, or"
    with pytest.raises(ApiError, match=message) as rejected:
        admission.reserve(1, 60)
    assert rejected.value.limit == "waiting_bytes"


def test_tokens_beyond_the_limit_are_rejected_and_released_at_the_end() -> None:
    admission = controller(max_tokens=48)
    for _ in range(4):
        admission.add_tokens(admission.reserve(1, 1), 20)  # counts as a quarter of the limit
    reservation = admission.reserve(1, 1)
    message = r"48 source tokens are held, and 12 more exceed the limit of 48 \(256 times SIGHTLINE_MAX_WAITING"
    with pytest.raises(ApiError, match=message) as rejected:
        admission.add_tokens(reservation, 20)
    assert rejected.value.limit == "waiting_tokens"
    admission.release(reservation)
    assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (4, 4, 48)


def test_a_call_of_any_size_is_admitted_to_an_empty_service() -> None:
    admission = controller(max_sequences=1, max_bytes=1, max_tokens=1, units_per_s=1.0)
    reservation = admission.reserve(32, 1000, units=1000.0, seconds_left=1.0)
    admission.add_tokens(reservation, 8000)
    assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (1, 1, 1)
    admission.release(reservation)
    assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (0, 0, 0)


def test_a_reservation_is_released_only_once() -> None:
    admission = controller()
    admission.reserve(1, 1)
    reservation = admission.reserve(2, 5)
    admission.add_tokens(reservation, 7)
    admission.release(reservation)
    admission.release(reservation)
    assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (1, 1, 0)


def test_large_calls_leave_capacity_for_small_ones() -> None:
    """Regression: nine calls of 32 inputs filled the queue, and single inputs were rejected."""
    admission = controller(max_sequences=288, max_bytes=10_000)
    for _ in range(8):
        admission.reserve(32, 1000)
    with pytest.raises(ApiError):
        admission.reserve(32, 1000)
    for _ in range(32):
        admission.reserve(1, 50)
    with pytest.raises(ApiError):
        admission.reserve(1, 50)


def test_a_call_is_rejected_if_others_delay_it_for_too_long() -> None:
    admission = controller(units_per_s=100.0)
    admission.reserve(1, 1, units=400.0)
    second = admission.reserve(1, 1, units=400.0)  # waits for 4 s
    with pytest.raises(ApiError, match=r"would wait about 8\.0 s; the limit is 5 s") as rejected:
        admission.reserve(1, 1, units=400.0)
    assert rejected.value.limit == "queue_time"
    second.units -= 300.0  # 400 and 100 are left
    admission.reserve(1, 1, units=400.0)


def test_a_small_call_is_delayed_in_proportion_to_its_own_size() -> None:
    admission = controller(units_per_s=100.0)
    for _ in range(12):
        reservation = admission.reserve(1, 1)
        reservation.units = 4000.0
    admission.reserve(1, 1, units=20.0)  # delayed by 12 * 20 units
    with pytest.raises(ApiError, match="would wait about"):
        admission.reserve(1, 1, units=50.0)


def test_a_call_that_cannot_end_before_its_deadline_is_rejected() -> None:
    admission = controller(units_per_s=100.0)
    admission.reserve(1, 1, units=200.0)
    with pytest.raises(ApiError, match=r"would take about 4\.0 s, but its deadline is in 3\.9 s") as rejected:
        admission.reserve(1, 1, units=200.0, seconds_left=3.9)
    assert rejected.value.limit == "deadline"
    admission.reserve(1, 1, units=200.0, seconds_left=4.1)


def test_a_reservation_grows_and_shrinks_without_counting_itself() -> None:
    admission = controller(max_sequences=10)
    admission.reserve(2, 10)
    reservation = admission.reserve(1, 10)
    admission.add_tokens(reservation, 7)
    admission.resize(reservation, 4, units=50.0)  # needs space for 7 beside the 2 of the other call
    assert (admission.num_calls, admission.num_sequences, reservation.units) == (2, 6, 50.0)
    message = r"2 of 10 sequences are running or waiting .*, and a call of 5 needs space for 9"
    with pytest.raises(ApiError, match=message):
        admission.resize(reservation, 5, units=60.0)
    assert (admission.num_calls, admission.num_sequences, reservation.units) == (2, 6, 50.0)
    admission.resize(reservation, 1)
    assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (3, 20, 0)
    admission.add_tokens(reservation, 5)
    assert admission.num_tokens == 5
    admission.release(reservation)
    assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (2, 10, 0)


def test_a_reservation_does_not_grow_beyond_its_deadline() -> None:
    admission = controller(units_per_s=100.0)
    reservation = admission.reserve(1, 1, units=10.0)
    admission.resize(reservation, 999, units=1e9, seconds_left=1.0)  # there is no other call
    admission.reserve(1, 1, units=10.0)
    admission.resize(reservation, 10, units=300.0, seconds_left=4.0)
    with pytest.raises(ApiError, match=r"would take about 4\.1 s, but its deadline is in 4\.0 s"):
        admission.resize(reservation, 10, units=400.0, seconds_left=4.0)


def test_no_work_is_rejected_before_the_speed_is_measured() -> None:
    admission = controller(units_per_s=None)
    admission.reserve(1, 1, units=1e9)
    admission.reserve(1, 1, units=1e9, seconds_left=0.001)


# The measured speed


def test_speed_is_measured_while_sequences_wait_and_old_measurements_expire() -> None:
    throughput = Throughput()
    now = 0.0
    for _ in range(100):  # nothing waits: rows are not full
        now += 0.01
        throughput.on_turn(1, now, is_saturated=False)
    assert throughput.units_per_s is None
    for _ in range(100):
        now += 0.01
        throughput.on_turn(32, now, is_saturated=True)
    assert throughput.units_per_s == pytest.approx(3200)
    for _ in range(2000):
        now += 0.01
        throughput.on_turn(8, now, is_saturated=True)
    assert throughput.units_per_s == pytest.approx(800, rel=0.01)


def test_idle_time_does_not_slow_the_measured_speed() -> None:
    throughput = Throughput()
    now = 0.0
    for _ in range(10):
        for turn in range(10):
            now += 0.01
            throughput.on_turn(10, now, is_saturated=turn < 9)
        now += 60.0
    assert throughput.units_per_s == pytest.approx(1000)


def test_the_work_of_a_generation_follows_the_mean_length_within_its_own_limits() -> None:
    throughput = Throughput()
    for _ in range(200):
        throughput.on_generated(10)
    assert expected_work(throughput, GenerateParameters(num_beams=4))[1] == pytest.approx(41, abs=0.1)
    assert expected_work(throughput, GenerateParameters(max_new_tokens=3)) == (3, 4)
    assert expected_work(throughput, GenerateParameters(min_new_tokens=50)) == (50, 51)
    assert expected_work(throughput, FORCED) == (0, 1)


# Memory of responses


def reserve(memory: ResponseMemory, num_bytes: int) -> ResponseReservation:
    reservation = ResponseReservation(memory)
    reservation.reserve(num_bytes)
    return reservation


def test_responses_that_do_not_fit_together_are_rejected_until_one_is_released() -> None:
    memory = ResponseMemory(100)
    first = reserve(memory, 60)
    with pytest.raises(
        ApiError, match=r"too little memory for 50 more bytes; all responses together may hold 100 bytes"
    ) as rejected:
        reserve(memory, 50)
    assert rejected.value.limit == "response_bytes"
    assert memory.num_bytes == 60
    first.release()
    first.release()
    assert memory.num_bytes == 0
    reserve(memory, 50)


def test_a_single_response_always_fits_and_may_grow() -> None:
    memory = ResponseMemory(100)
    alone = reserve(memory, 300)
    assert alone.use(400)
    assert memory.num_bytes == 75  # it leaves space for small ones
    small = reserve(memory, 20)
    assert alone.use(100)
    with pytest.raises(ApiError):
        reserve(memory, 6)
    assert small.use(25) and not small.use(1)
    for one in (alone, small):
        one.release()
    assert memory.num_bytes == 0


def test_a_response_uses_its_reservation_first_and_then_grows_up_to_the_limit() -> None:
    memory = ResponseMemory(100)
    reserve(memory, 30)
    growing = reserve(memory, 20)
    assert growing.use(15) and growing.use(5)
    assert memory.num_bytes == 50
    assert growing.use(50)
    assert memory.num_bytes == 100
    assert not growing.use(1)
    assert memory.num_bytes == 100


def test_growth_after_the_release_reserves_nothing() -> None:
    memory = ResponseMemory(100)
    gone = reserve(memory, 20)
    gone.release()
    assert gone.use(1000)
    assert memory.num_bytes == 0


def test_growth_and_releases_in_several_threads_leave_nothing_reserved() -> None:
    memory = ResponseMemory(10_000)
    reservations = [reserve(memory, 10) for _ in range(50)]

    def grow() -> None:
        for reservation in reservations:
            for _ in range(50):
                reservation.use(3)

    thread = threading.Thread(target=grow)
    thread.start()
    for reservation in reservations:
        reservation.release()
    thread.join()
    assert memory.num_bytes == 0


# The rate of rejections


def test_few_rejections_are_sent_at_once_and_many_are_spread_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, delays = 1000.0, list[float]()
    monkeypatch.setattr("asyncio.sleep", AsyncMock(side_effect=delays.append))
    pacer = RejectionPacer(1, lambda: now)

    async def reject(count: int) -> list[int]:
        return [await pacer.wait() for _ in range(count)]

    assert asyncio.run(reject(100)) == [0] * 100
    assert delays == []
    later = asyncio.run(reject(1500))
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(1 / 100, abs=1e-6)
    assert delays[-1] == pytest.approx(1.0)  # never longer
    assert (later[:200], later[350], later[-1]) == ([0] * 200, 2, 10)
    now += 20.0
    assert asyncio.run(reject(1)) == [0]
    assert len(delays) == 1500


def test_rejections_are_sent_at_once_while_the_largest_number_is_delayed() -> None:
    pacer = RejectionPacer(2, lambda: 1000.0)

    async def reject_and_cancel() -> None:
        for _ in range(100):
            await pacer.wait()
        delayed = [asyncio.create_task(pacer.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.wait_for(pacer.wait(), 0.001)  # at once
        for task in delayed:
            task.cancel()
        await asyncio.wait(delayed)
        with pytest.raises(TimeoutError):  # there is a place again
            await asyncio.wait_for(pacer.wait(), 0.001)

    asyncio.run(reject_and_cancel())


def test_a_caller_never_holds_more_than_it_leaves_free() -> None:
    admission = controller(max_sequences=8, max_bytes=100, max_tokens=100)
    for _ in range(4):
        admission.reserve(1, 10, caller="a")
    with pytest.raises(ApiError, match=r"4 of 8 sequences .*, 4 of them for this API key, and as many must stay free"):
        admission.reserve(1, 10, caller="a")
    admission.reserve(1, 10, caller="b")
    other = admission.reserve(2, 10, caller="c")  # places for three are free
    with pytest.raises(ApiError, match="1 of them for this API key"):
        admission.reserve(1, 10, caller="b")
    admission.release(other)
    with pytest.raises(ApiError, match="bytes of request bodies are held, 10 of them"):
        admission.reserve(1, 45, caller="b")
    tokens = admission.reserve(1, 10, caller="b")
    for _ in range(2):
        admission.add_tokens(tokens, 50)
    with pytest.raises(ApiError, match="50 source tokens are held, 50 of them"):
        admission.add_tokens(tokens, 1)


def test_an_address_holds_at_most_three_quarters_and_a_large_call_a_quarter() -> None:
    """Regression: after one call of 495,616 tokens, all others were rejected for half a minute."""
    admission = controller(max_sequences=8, max_bytes=1000, max_tokens=65_536)
    held = [admission.reserve(1, 10, address="10.0.0.1") for _ in range(6)]
    with pytest.raises(ApiError, match=r"6 of 8 sequences .*, 6 of them for this address, and a third as many must"):
        admission.reserve(1, 10, address="10.0.0.1")
    other = admission.reserve(1, 10, address="10.0.0.2")
    for reservation in held[:3]:
        admission.add_tokens(reservation, 495_616)
    with pytest.raises(ApiError, match="49152 source tokens are held, 49152 of them for this address"):
        admission.add_tokens(held[3], 1)
    admission.add_tokens(other, 10_000)


def test_another_caller_delays_a_call_by_one_share() -> None:
    admission = controller()  # without a speed, all calls are admitted
    for _ in range(20):
        admission.reserve(1, 1, units=400.0, caller="a")
    admission.throughput.units_per_s = 100.0
    admission.reserve(1, 1, units=400.0, caller="b")  # waits for 4 s, and not for 80 s
    with pytest.raises(ApiError, match=r"would wait about 8\.0 s"):
        admission.reserve(1, 1, units=400.0, caller="b")
