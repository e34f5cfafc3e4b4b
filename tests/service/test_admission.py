import pytest

from service.admission import Door
from service.errors import ApiError


def test_sequences_beyond_the_limit_are_refused_and_take_no_place() -> None:
    door = Door(max_sequences=3, max_bytes=1000, max_tokens=1000)
    door.reserve(2, 10)
    with pytest.raises(ApiError, match="overloaded"):
        door.reserve(2, 10)
    assert (door.num_sequences, door.num_bytes) == (2, 10)
    door.reserve(1, 10)


def test_bytes_beyond_the_limit_are_refused() -> None:
    door = Door(max_sequences=10, max_bytes=100, max_tokens=1000)
    door.reserve(1, 60)
    with pytest.raises(ApiError, match="overloaded"):
        door.reserve(1, 60)


def test_tokens_beyond_the_limit_are_refused_and_the_place_is_given_back_at_the_end() -> None:
    door = Door(max_sequences=10, max_bytes=100, max_tokens=50)
    door.reserve(1, 1).add_tokens(40)
    place = door.reserve(1, 1)
    with place, pytest.raises(ApiError, match="overloaded"):
        place.add_tokens(20)
    assert (door.num_sequences, door.num_bytes, door.num_tokens) == (1, 1, 40)


def test_an_empty_door_lets_in_a_call_of_any_size() -> None:
    door = Door(max_sequences=1, max_bytes=1, max_tokens=1)
    with door.reserve(32, 1000) as place:
        place.add_tokens(8000)
    assert (door.num_sequences, door.num_bytes, door.num_tokens) == (0, 0, 0)


def test_a_place_is_given_back_once_however_often_it_is_released() -> None:
    door = Door(max_sequences=10, max_bytes=100, max_tokens=50)
    door.reserve(1, 1)
    with door.reserve(2, 5) as place:
        place.add_tokens(7)
        place.release()
    place.release()
    assert (door.num_sequences, door.num_bytes, door.num_tokens) == (1, 1, 0)
