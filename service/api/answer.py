"""POST /v1/answer."""

from typing import Annotated

from pydantic import ConfigDict, Field

from sightline.service.api.endpoint import TASK_ERRORS, Call, Endpoint
from sightline.service.api.types import ModelName
from sightline.service.body_fields import RequestBody, Text
from sightline.service.inference.answer import AnswerOptions, AnswerResult, answer

DEFAULTS = AnswerOptions()
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
    top_k: TopK = DEFAULTS.top_k
    max_answer_tokens: MaxAnswerTokens = DEFAULTS.max_answer_tokens
    can_be_empty: CanBeEmpty = DEFAULTS.can_be_empty
    whole_words: WholeWords = DEFAULTS.whole_words
    max_tokens: MaxTokens = DEFAULTS.max_tokens
    overlap: Overlap = DEFAULTS.overlap
    max_question_tokens: MaxQuestionTokens = DEFAULTS.max_question_tokens

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"question": "Where does the dog run?", "context": "A dog runs in Berlin."},
                {"question": "Who sleeps?", "context": "A dog runs in Berlin.", "can_be_empty": True, "top_k": 2},
            ]
        }
    )


async def answer_question(call: Call, body: AnswerBody) -> AnswerResult:
    """Find the parts of a text that answer a question, with their positions in the text."""
    model = await call.model(body.model, "answer")
    options = AnswerOptions(**body.model_dump(exclude={"model", "question", "context"}))
    return await answer(call, model, body.question, body.context, options)


ENDPOINTS = (Endpoint("POST", "/v1/answer", answer_question, AnswerResult, errors=TASK_ERRORS),)
