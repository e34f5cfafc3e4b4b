"""Tasks of Hugging Face's inference API that neither TGI nor TEI has."""

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from sightline.service.api.endpoint import Call
from sightline.service.body_fields import RequestBody, Text, TextOrTexts, construct
from sightline.service.compat.common import manifest_of_query
from sightline.service.tasks import answer, fill_mask
from sightline.service.tasks.answer import Answer
from sightline.service.tasks.fill_mask import FillMaskBody


class QuestionInputs(RequestBody):
    question: Annotated[Text, Field(description="The question.")]
    context: Annotated[Text, Field(description="The text that contains the answer.")]


class QuestionParameters(RequestBody):
    top_k: answer.TopK | None = None
    max_answer_tokens: answer.MaxAnswerTokens | None = Field(default=None, alias="max_answer_len")
    can_be_empty: answer.CanBeEmpty | None = Field(default=None, alias="handle_impossible_answer")
    whole_words: answer.WholeWords | None = Field(default=None, alias="align_to_words")
    max_tokens: answer.MaxTokens | None = Field(default=None, alias="max_seq_len")
    overlap: answer.Overlap | None = Field(default=None, alias="doc_stride")
    max_question_tokens: answer.MaxQuestionTokens | None = Field(default=None, alias="max_question_len")


class QuestionBody(RequestBody):
    inputs: Annotated[QuestionInputs, Field(description="Question and context.")]
    parameters: Annotated[QuestionParameters | None, Field(description="Options of the search.")] = None

    EXAMPLES = ({"inputs": {"question": "Where does the dog run?", "context": "A dog runs in Berlin."}},)


async def answer_question(call: Call, body: QuestionBody, model: str | None) -> Answer | list[Answer]:
    """Find the parts of a text that answer a question: one object, or a list of several."""
    name, inputs = manifest_of_query(call, model, "answer").name, body.inputs
    parameters = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
    options = construct(answer.AnswerBody, model=name, question=inputs.question, context=inputs.context, **parameters)
    answers = (await answer.answer_question(call, options)).answers
    return answers[0] if len(answers) == 1 else answers


class FillMaskParameters(RequestBody):
    top_k: fill_mask.TopK | None = None
    targets: fill_mask.Targets | None = None


class FillMaskTaskBody(RequestBody):
    inputs: Annotated[TextOrTexts, Field(description="A text with masks, or a list of them.")]
    parameters: Annotated[FillMaskParameters | None, Field(description="Options of the search.")] = None

    EXAMPLES = ({"inputs": "A dog [MASK] in the park."},)


class Filled(TypedDict):
    """A token for a mask."""

    score: Annotated[float, Field(description="Its probability among all tokens.")]
    token: Annotated[int, Field(description="Token id.")]
    token_str: Annotated[str, Field(description="Text of the token.")]
    sequence: Annotated[str, Field(description="The input with this token.")]


async def fill_masks(call: Call, body: FillMaskTaskBody, model: str | None) -> list[Any]:
    """Find the tokens for the masks of texts: lists of them, of masks if a text has several, and of
    texts if there are several.
    """
    name = manifest_of_query(call, model, "fill-mask").name
    parameters = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
    result = await fill_mask.fill_masks(call, construct(FillMaskBody, model=name, inputs=body.inputs, **parameters))
    outputs = []
    for output in result.outputs:
        masks: list[list[Filled]] = [
            [{"score": top.score, "token": top.id, "token_str": top.text, "sequence": top.sequence} for top in mask]
            for mask in output.masks
        ]
        outputs.append(masks[0] if len(masks) == 1 else masks)
    return outputs[0] if len(outputs) == 1 else outputs
