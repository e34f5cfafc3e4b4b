"""POST /v1/answer: the parts of a text that answer a question."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sightline.base.text.tokenizer import PairWindow
from sightline.service.api.endpoint import TASK_ERRORS, Call, Endpoint
from sightline.service.api.types import ModelName
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody, Text
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import input_too_long
from sightline.service.inference.labels import apply_function
from sightline.service.inference.results import TimingsMs, Usage
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources
from sightline.service.tasks.tokens import BYTES_PER_SPAN

EXCLUDED = -10000.0  # logit of tokens that no answer can begin or end at
MAX_TOKENS = 1 << 20  # no model has more positions

TopK = Annotated[int, Field(ge=1, le=100, description="Number of answers.")]
MaxAnswerTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS, description="Longest answer in tokens.")]
CanBeEmpty = Annotated[bool, Field(description="Allow the empty answer, that the context has none.")]
WholeWords = Annotated[bool, Field(description="Begin and end answers with whole words.")]
MaxTokens = Annotated[
    int,
    Field(
        ge=8,
        le=MAX_TOKENS,
        description="Tokens of a window, question and special tokens included. A longer context is read in "
        "overlapping windows.",
    ),
]
Overlap = Annotated[
    int, Field(ge=0, le=MAX_TOKENS, description="Tokens that consecutive windows share; at most half of a window.")
]
MaxQuestionTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS, description="The question is cut after these tokens.")]


class AnswerBody(RequestBody):
    model: ModelName = None
    question: Annotated[Text, Field(description="The question.")]
    context: Annotated[Text, Field(description="The text that contains the answer.")]
    top_k: TopK = 1
    max_answer_tokens: MaxAnswerTokens = 15
    can_be_empty: CanBeEmpty = False
    whole_words: WholeWords = True
    max_tokens: MaxTokens = 384
    overlap: Overlap = 128
    max_question_tokens: MaxQuestionTokens = 64

    EXAMPLES = (
        {"question": "Where does the dog run?", "context": "A dog runs in Berlin."},
        {"question": "Who sleeps?", "context": "A dog runs in Berlin.", "can_be_empty": True, "top_k": 2},
    )


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


async def answer_question(call: Call, body: AnswerBody) -> AnswerResult:
    """Find the parts of a text that answer a question, with their positions in the text."""
    # The procedure of Devlin et al. 2019 (section 4.2), as `transformers` 4 has it: too long a
    # context is read in overlapping windows, whose candidates compete by their scores.
    model = await call.model(body.model, "answer")
    await call.reserve(model, 1, 1.0, "context")
    windows = await call.tokenize(lambda: _windows(call, model, body), (body.question, body.context))
    admitted = await call.reserve(model, len(windows), len(windows), "context")
    num_tokens = sum(len(window.ids) for window in windows)
    admitted.controller.add_tokens(admitted.reservation, num_tokens)
    await call.reserve_tokens(num_tokens)
    call.response_memory.reserve(BYTES_PER_SPAN * num_tokens)

    def convert(index: int, result: Encoded) -> tuple[list[Answer], float]:
        assert result.label_scores is not None
        return find_answers(windows[index], result.label_scores, body)

    per_window, usage, timings = await encode_sources(
        admitted, [window.ids for window in windows], convert, return_labels=True
    )
    candidates = [candidate for answers, _ in per_window for candidate in answers]
    if body.can_be_empty:
        candidates.append(Answer("", min(null for _, null in per_window), 0, 0))
    return AnswerResult(model.name, _best(candidates, body.top_k), usage, timings)


def _windows(call: Call, model: ServedModel, body: AnswerBody) -> list[PairWindow]:
    """Tokenize a question and its context."""
    tokenizer = model.source_tokenizer
    max_tokens = min(body.max_tokens, model.manifest.limits.max_source_tokens)
    overlap = min(body.overlap, max_tokens // 2)
    most = max_tokens * call.service.settings.max_inputs  # more tokens need more windows than a call may have
    least = tokenizer.min_num_tokens(body.context, most)
    if least > most:
        raise input_too_long(f"at least {least}", most, "context", None)
    try:
        windows = tokenizer.windows(body.question, body.context, max_tokens, body.max_question_tokens, overlap)
    except ValueError:
        message = (
            f"It leaves too little of a window of {max_tokens} tokens for the context; shorten it, or choose a smaller "
            "overlap."
        )
        raise ApiError("input_too_long", message, field="question") from None
    if not windows:
        raise ApiError("empty_input", "It has no tokens of this model.", field="context")
    return windows


def find_answers(window: PairWindow, logits: NDArray[np.float32], body: AnswerBody) -> tuple[list[Answer], float]:
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
    products -= np.triu(products, body.max_answer_tokens)
    # Different tokens may become the same words.
    count = 2 * body.top_k + 10 if body.whole_words else body.top_k
    ranked = np.argsort(-products, axis=None, kind="stable")[:count]
    places = window.words if body.whole_words else window.tokens
    answers = []
    for index in ranked.tolist():
        first, last = divmod(index, size)
        if last < first:  # fewer spans than asked for
            continue
        start, end = places[first][0], places[last][1]
        answers.append(Answer(body.context[start:end], float(products[first, last]), start, end))
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


ENDPOINTS = (Endpoint("POST", "/v1/answer", answer_question, AnswerResult, errors=TASK_ERRORS),)
