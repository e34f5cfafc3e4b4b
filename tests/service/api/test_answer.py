"""Extractive question answering, compared with a search by plain loops."""

import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.service.conftest import MakeBackend, Running, Start, byte_level_tokenizer, classifying
from tests.support.fake_runner import fake_token_label_logprobs

pytestmark = pytest.mark.anyio
QUESTION = "who runs?"
CONTEXT = "A dog runs and Größe 🙂 sleeps while the cat and the dog eat."


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    backend = classifying(make_backend(), "reader", "span", ("start", "end"))
    async with start(backend, default_model="reader", max_inputs=16) as running:
        yield running


async def ask(running: Running, **fields: Any) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = (
        await running.result("/v1/answer", {"question": QUESTION, "context": CONTEXT, **fields})
    )["answers"]
    return answers


def expected(top_k: int, longest: int, max_tokens: int, overlap: int, can_be_empty: bool) -> list[dict[str, Any]]:
    """Return the answers by token: loops over all spans of windows that are cut by hand.

    The template of this tokenizer adds no token to a pair.
    """
    tokenizer = byte_level_tokenizer()
    question = tokenizer.encode(QUESTION, add_special_tokens=False).ids
    context = tokenizer.encode(CONTEXT, add_special_tokens=False)
    before, size = len(question), max_tokens - len(question)
    found: dict[str, dict[str, Any]] = {}
    for start in itertools.count(0, size - overlap):
        offsets = context.offsets[start : start + size]
        scores = np.exp(fake_token_label_logprobs([*question, *context.ids[start : start + size]], 2))
        shares = scores[before:].astype(np.float64) / scores[before:].sum(axis=0)
        candidates = [
            (shares[first, 0] * shares[last, 1], -first, -last)
            for first in range(len(offsets))
            for last in range(first, min(first + longest, len(offsets)))
        ]
        for score, first, last in sorted(candidates, reverse=True)[:top_k]:
            begin, end = offsets[-first][0], offsets[-last][1]
            one = {"answer": CONTEXT[begin:end], "score": 0.0, "start": begin, "end": end}
            found.setdefault(CONTEXT[begin:end].lower(), one)["score"] += score
        if start + size >= len(context):
            break
    answers = list(found.values()) + [{"answer": "", "score": 0.0, "start": 0, "end": 0}] * can_be_empty
    return sorted(answers, key=lambda one: -one["score"])[:top_k]


@pytest.mark.parametrize("can_be_empty", [False, True])
@pytest.mark.parametrize(("max_tokens", "overlap"), [(64, 0), (30, 5), (30, 0), (26, 9)])
async def test_answers_equal_those_of_plain_loops(
    running: Running, max_tokens: int, overlap: int, can_be_empty: bool
) -> None:
    options = {"max_tokens": max_tokens, "overlap": overlap, "can_be_empty": can_be_empty, "top_k": 4}
    answers = await ask(running, **options, max_answer_tokens=3, whole_words=False)
    wanted = expected(4, 3, max_tokens, overlap, can_be_empty)
    assert [(one["answer"], one["start"], one["end"]) for one in answers] == [
        (one["answer"], one["start"], one["end"]) for one in wanted
    ]
    assert [one["score"] for one in answers] == pytest.approx([one["score"] for one in wanted], rel=1e-5)


async def test_answers_are_whole_words_by_default(running: Running) -> None:
    words = [match.span() for match in re.finditer(r" ?\w+| ?[^\w\s]+", CONTEXT)]
    starts, ends = ({word[side] for word in words} for side in (0, 1))
    parts = await ask(running, top_k=20, max_answer_tokens=2, whole_words=False)
    assert not {one["start"] for one in parts} <= starts, "an answer that begins within a word"
    for one in await ask(running, top_k=20, max_answer_tokens=2):
        assert one["answer"] == CONTEXT[one["start"] : one["end"]]
        assert one["start"] in starts and one["end"] in ends


async def test_the_question_is_cut(running: Running) -> None:
    long = await running.post("/v1/answer", {"question": "dog " * 60, "context": "a dog", "max_question_tokens": 5})
    assert long.status_code == 200
    short = await running.post("/v1/answer", {"question": "dog dog dog dog dog", "context": "a dog"})
    assert long.json()["usage"] == short.json()["usage"]


async def test_hugging_faces_client_gets_one_answer_or_several(running: Running) -> None:
    inputs = {"question": QUESTION, "context": CONTEXT}
    own = await ask(running)
    assert (await running.post("/?model=reader", {"inputs": inputs})).json() == own[0]
    parameters = {"top_k": 3, "max_answer_len": 2, "align_to_words": False, "max_seq_len": 30, "doc_stride": 4}
    several = await running.post("/", {"inputs": inputs, "parameters": parameters})
    assert several.json() == await ask(
        running, top_k=3, max_answer_tokens=2, whole_words=False, max_tokens=30, overlap=4
    )
    assert (await running.client.get("/info")).json()["model_pipeline_tag"] == "question-answering"
