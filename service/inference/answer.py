"""Extractive question answering: the parts of a text that answer a question."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sightline.base.text.tokenizer import PairWindow
from sightline.service.api_errors import ApiError
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import Call, input_too_long
from sightline.service.inference.classify import apply_function
from sightline.service.inference.results import TimingsMs, Usage
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources
from sightline.service.inference.tokens import BYTES_PER_SPAN

EXCLUDED = -10000.0  # logit of tokens that no answer can begin or end at


@dataclass(frozen=True)
class Answer:
    """A part of the context. Indices count characters."""

    answer: Annotated[str, Field(description="Text of the answer; empty if the context has none.")]
    score: Annotated[
        float, Field(description="Probability of its first token times that of its last, among those of its window.")
    ]
    start: Annotated[int, Field(description="Index of its first character in the context.")]
    end: Annotated[int, Field(description="Index after its last character in the context.")]


@dataclass(frozen=True)
class AnswerResult:
    """The answers to the question of a call."""

    model: Annotated[str, Field(description="Name of the model.")]
    answers: Annotated[list[Answer], Field(description="The answers, the most probable first.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


@dataclass(frozen=True)
class AnswerOptions:
    """Options of the search for answers; the defaults are those of `transformers`."""

    top_k: int = 1  # number of answers
    max_answer_tokens: int = 15
    can_be_empty: bool = False  # an answer may be that the context has none
    whole_words: bool = True  # answers begin and end with a word
    max_tokens: int = 384  # of a window, question and special tokens included
    overlap: int = 128  # tokens that consecutive windows share; at most half of a window
    max_question_tokens: int = 64  # the question is cut after these


async def answer(
    call: Call, model: ServedModel, question: str, context: str, options: AnswerOptions, field: str = "context"
) -> AnswerResult:
    """Return the parts of a context that answer a question.

    This is the procedure of Devlin et al. 2019 (section 4.2), as `transformers` 4 has it: too long
    a context is read in overlapping windows, whose candidates compete by their scores.
    """
    await call.reserve(model, 1, 1.0, field)
    windows = await call.tokenize(lambda: _windows(call, model, question, context, options, field), (question, context))
    await call.reserve(model, len(windows), len(windows), field)
    num_tokens = sum(len(window.ids) for window in windows)
    assert call.controller is not None and call.reservation is not None
    call.controller.add_tokens(call.reservation, num_tokens)
    await call.reserve_tokens(num_tokens)
    call.response_memory.reserve(BYTES_PER_SPAN * num_tokens)

    def convert(index: int, result: Encoded) -> tuple[list[Answer], float]:
        assert result.label_scores is not None
        return find_answers(windows[index], result.label_scores, context, options)

    per_window, usage, timings = await encode_sources(
        call, model, [window.ids for window in windows], convert, return_labels=True
    )
    candidates = [candidate for answers, _ in per_window for candidate in answers]
    if options.can_be_empty:
        candidates.append(Answer("", min(null for _, null in per_window), 0, 0))
    return AnswerResult(model.name, _best(candidates, options.top_k), usage, timings)


def _windows(
    call: Call, model: ServedModel, question: str, context: str, options: AnswerOptions, field: str
) -> list[PairWindow]:
    """Tokenize a question and its context."""
    tokenizer = model.source_tokenizer
    max_tokens = min(options.max_tokens, model.manifest.limits.max_source_tokens)
    overlap = min(options.overlap, max_tokens // 2)
    most = max_tokens * call.service.settings.max_inputs  # more tokens need more windows than a call may have
    least = tokenizer.min_num_tokens(context, most)
    if least > most:
        raise input_too_long(f"at least {least}", most, field, None)
    try:
        windows = tokenizer.windows(question, context, max_tokens, options.max_question_tokens, overlap)
    except ValueError:
        message = (
            f"It leaves too little of a window of {max_tokens} tokens for the context; shorten it, or choose a smaller "
            "overlap."
        )
        raise ApiError("input_too_long", message, field="question") from None
    if not windows:
        raise ApiError("empty_input", "It has no tokens of this model.", field=field)
    return windows


def find_answers(
    window: PairWindow, logits: NDArray[np.float32], context: str, options: AnswerOptions
) -> tuple[list[Answer], float]:
    """Return the most probable answers in a window, and the score of having none.

    `logits` (S, 2) score the tokens to be the first and the last of an answer.
    """
    size = len(window.tokens)
    part = slice(window.first, window.first + size)
    is_answer = np.zeros(len(logits), bool)
    is_answer[part] = True
    is_answer[0] |= window.starts_special  # it stands for no answer
    scores = apply_function(np.where(is_answer[:, None], logits, np.float32(EXCLUDED)).T, "softmax")  # (2, S)
    products = np.triu(np.outer(scores[0, part], scores[1, part]))
    products -= np.triu(products, options.max_answer_tokens)
    # Different tokens may become the same words.
    count = 2 * options.top_k + 10 if options.whole_words else options.top_k
    ranked = np.argsort(-products, axis=None, kind="stable")[:count]
    places = window.words if options.whole_words else window.tokens
    answers = []
    for index in ranked.tolist():
        first, last = divmod(index, size)
        if last < first:  # fewer spans than asked for
            continue
        start, end = places[first][0], places[last][1]
        answers.append(Answer(context[start:end], float(products[first, last]), start, end))
    return answers, float(scores[0, 0] * scores[1, 0])


def _best(candidates: Iterable[Answer], count: int) -> list[Answer]:
    """Return the best answers with different texts; the scores of equal texts add up."""
    by_text: dict[str, Answer] = {}
    for candidate in candidates:
        known = by_text.get(candidate.answer.lower())
        by_text[candidate.answer.lower()] = (
            candidate if known is None else Answer(known.answer, known.score + candidate.score, known.start, known.end)
        )
    return sorted(by_text.values(), key=lambda candidate: -candidate.score)[:count]
