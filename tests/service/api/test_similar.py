from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.tasks.similar import nearness
from tests.service.conftest import MakeBackend, Running, Start
from tests.support.fake_runner import Faults, fake_table

pytestmark = pytest.mark.anyio
SPECIAL = 3  # number of special tokens at the start of the vocabulary


async def ask(running: Running, **body: Any) -> list[Any]:
    content = await running.result("/v1/similar", body)
    assert set(content) == {"model", "neighbours"}
    return list(content["neighbours"])


def slowly(tokenizer: TextTokenizer, words: list[str], top_k: int) -> list[tuple[int, float]]:
    """The nearest tokens and their scores, vector by vector."""
    units = [row / np.linalg.norm(row) for row in fake_table(len(tokenizer)).astype(np.float64)]
    ids = [id_ for word in words for id_ in tokenizer.encode(word, add_special_tokens=False)]
    query = units[ids[0]] if len(ids) == 1 else units[ids[1]] - units[ids[0]] + units[ids[2]]
    scores = {id_: float(query @ unit / np.linalg.norm(query)) for id_, unit in enumerate(units)}
    others = [id_ for id_ in scores if id_ >= SPECIAL and id_ not in ids]
    return [(id_, scores[id_]) for id_ in sorted(others, key=lambda id_: -scores[id_])[:top_k]]


@pytest.mark.parametrize("words", [["dog"], ["dog", "a", "H"], ["a", "H", "dog"], ["a", "a", "dog"]])
async def test_neighbours_equal_those_of_a_search_over_single_vectors(
    running: Running, tokenizer: TextTokenizer, words: list[str]
) -> None:
    asked = {"token": words[0]} if len(words) == 1 else {"analogy": words}
    neighbours = await ask(running, **asked, top_k=100)
    expected = slowly(tokenizer, words, 100)
    assert [one["id"] for one in neighbours] == [id_ for id_, _ in expected]
    assert [one["score"] for one in neighbours] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert [one["text"] for one in neighbours] == [tokenizer.name(id_) for id_, _ in expected]
    assert await ask(running, **asked) == neighbours[:10]


def test_scores_are_finite_and_within_the_range_of_a_cosine() -> None:
    rounded = np.array([[1.0, 1.0, -1.02], [1.01, 1.0, -1.0], [1.0, 1.0, -1.0]], np.float32)
    assert np.abs(nearness(rounded[:1], [0])).max() == 1
    assert np.isfinite(nearness(rounded, [0, 1, 2])).all()
    assert np.isfinite(nearness(np.zeros((3, 3), np.float32), [0, 1, 2])).all()


async def test_a_word_is_the_same_with_the_space_before_it(running: Running) -> None:
    assert await ask(running, token=" dog") == await ask(running, token="dog")


async def test_a_side_is_read_by_its_own_tokenizer(running: Running) -> None:
    by_side = [await ask(running, token="dog", side=side) for side in ("source", "target")]
    assert by_side == [await ask(running, token="dog")] * 2  # the fake model has one tokenizer for both


async def test_embeddings_that_are_not_finite_are_an_internal_error_of_one_call(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    (poisoned,) = tokenizer.encode("dog", add_special_tokens=False)
    async with start(make_backend(faults=Faults(nan_id=poisoned))) as running:
        assert await running.error("/v1/similar", {"token": "dog"}) == (500, "internal", None)
        assert await ask(running, token="a")


async def test_a_comparison_is_counted(running: Running) -> None:
    await ask(running, token="dog")
    await ask(running, analogy=["a", "H", "dog"])
    finished = 'sightline_request_success_total{finished_reason="compared",model_name="fake"}'
    assert await running.metric(finished) == 2
    assert await running.metric('sightline_prompt_tokens_total{model_name="fake"}') == 4
    assert await running.metric('sightline_e2e_request_latency_seconds_count{model_name="fake"}') == 2
