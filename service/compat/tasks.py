"""Tasks of Hugging Face's inference API that neither TGI nor TEI has."""

from typing import Annotated

from pydantic import ConfigDict, Field

from service.api.answer import CanBeEmpty, MaxAnswerTokens, MaxQuestionTokens, MaxTokens, Overlap, TopK, WholeWords
from service.api.endpoint import Call
from service.compat.common import model_of_query
from service.fields import RequestBody, Text
from service.inference.answer import Answer, AnswerOptions, answer


class QuestionInputs(RequestBody):
    question: Annotated[Text, Field(description="The question.")]
    context: Annotated[Text, Field(description="The text that contains the answer.")]


class QuestionParameters(RequestBody):
    top_k: TopK | None = None
    max_answer_tokens: MaxAnswerTokens | None = Field(default=None, alias="max_answer_len")
    can_be_empty: CanBeEmpty | None = Field(default=None, alias="handle_impossible_answer")
    whole_words: WholeWords | None = Field(default=None, alias="align_to_words")
    max_tokens: MaxTokens | None = Field(default=None, alias="max_seq_len")
    overlap: Overlap | None = Field(default=None, alias="doc_stride")
    max_question_tokens: MaxQuestionTokens | None = Field(default=None, alias="max_question_len")


class QuestionBody(RequestBody):
    inputs: Annotated[QuestionInputs, Field(description="Question and context.")]
    parameters: Annotated[QuestionParameters | None, Field(description="Options of the search.")] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": {"question": "Where does the dog run?", "context": "A dog runs in Berlin."}}]
        }
    )


async def answer_question(call: Call, body: QuestionBody, model: str | None) -> Answer | list[Answer]:
    """Find the parts of a text that answer a question: one object, or a list of several."""
    served = await model_of_query(call, model, "answer")
    given = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
    options = AnswerOptions(**given)
    result = await answer(call, served, body.inputs.question, body.inputs.context, options, "inputs.context")
    return result.answers[0] if len(result.answers) == 1 else result.answers
