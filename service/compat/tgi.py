"""Endpoints of Text Generation Inference; null in a request omits the field."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired, cast

from pydantic import AfterValidator, BaseModel, Field
from typing_extensions import TypedDict

from sightline.service import parameters
from sightline.service.api.endpoint import (
    EVENTS,
    JSON,
    PARAMETER_ERRORS,
    Call,
    Endpoint,
    EventEncoder,
    EventStream,
    ModelInQuery,
    event_of,
)
from sightline.service.body_fields import RequestBody, Text, Texts, construct, must_equal
from sightline.service.compat.common import (
    blank_before,
    check_continues_prompt,
    model_of_query,
    needs_samples,
    typed_errors,
)
from sightline.service.constraints import Constraint, check_schema, check_text
from sightline.service.inference.generate import GenerateOutput, parameters_for
from sightline.service.inference.language_choice import generating_model
from sightline.service.inference.results import OutputToken, alternatives_of
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.inference.service import ServedModel
from sightline.service.inference.streaming import StreamedSequence, StreamEnd, StreamToken, stream
from sightline.service.parameters import FILTERS, given_parameters


class Grammar(RequestBody):
    type: Annotated[Literal["json", "json_schema", "regex"], Field(description="Kind of the value.")]
    value: Annotated[Any, Field(description="JSON Schema, object with a `schema`, or regular expression.")]


def constraint_of(grammar: Grammar) -> Constraint:
    if grammar.type == "regex":
        return construct(Constraint, regex=check_text(grammar.value, "value"))
    is_named = grammar.type == "json_schema" and isinstance(grammar.value, dict)
    schema = grammar.value.get("schema") if is_named else grammar.value
    return construct(Constraint, json_schema=check_schema(schema, "value", *["schema"] * is_named))


class TextGenerationParameters(RequestBody):
    max_new_tokens: parameters.NumNewTokens | None = Field(
        default=None, description=f"Maximum number of generated tokens. {parameters.DEFAULT_LENGTH}"
    )
    do_sample: bool | None = Field(
        default=None,
        description="Sample each token; implied by top_k, a temperature other than 1, or a top_p or typical_p below 1.",
    )
    temperature: parameters.Temperature | None = None
    top_k: parameters.TopK | None = None
    top_p: parameters.TopP | None = None
    typical_p: parameters.TypicalP | None = None
    seed: Annotated[parameters.Seed | None, Field(description="Seed of the sampling; random if absent.")] = None
    stop: parameters.Stop | None = None
    repetition_penalty: parameters.RepetitionPenalty | None = None
    frequency_penalty: parameters.FrequencyPenalty | None = None
    source_language: Annotated[
        parameters.Language | None,
        Field(alias="src_lang", description="Language of the input; for a model that translates."),
    ] = None
    target_language: Annotated[
        parameters.Language | None,
        Field(alias="tgt_lang", description="Language of the text; for a model that translates."),
    ] = None
    clean_up_tokenization_spaces: Annotated[Any, must_equal(False)] = None
    return_full_text: bool | None = Field(
        default=None, description="Return the prompt before the text; only for decoder-only models."
    )
    details: Annotated[bool | None, Field(description="Return the tokens with their log-probabilities.")] = None
    top_logprobs: parameters.TopLogprobs | None = Field(default=None, alias="top_n_tokens")
    best_of: Annotated[Any, must_equal(1)] = None
    decoder_input_details: Annotated[Any, must_equal(False)] = None
    watermark: Annotated[Any, must_equal(False)] = None
    truncate: Annotated[Any, must_equal()] = None
    constraint: Annotated[Grammar, AfterValidator(constraint_of)] | None = Field(
        default=None, alias="grammar", description="JSON Schema or regular expression that the text must match."
    )
    adapter_id: Annotated[Any, must_equal()] = None


class TextGenerationBody(RequestBody):
    inputs: Annotated[Text, Field(description="Prompt.")]
    parameters: Annotated[TextGenerationParameters | None, Field(description="Generation parameters.")] = None
    stream: Annotated[bool | None, Field(description="Send server-sent events, one for each token.")] = None

    EXAMPLES: ClassVar[Sequence[Any]] = (
        {"inputs": "A man is riding a bicycle."},
        {"inputs": "A dog runs.", "parameters": {"details": True, "top_n_tokens": 2, "stop": ["."]}},
        {"inputs": "A dog runs.", "parameters": {"do_sample": True, "temperature": 0.7, "seed": 7}},
        {"inputs": "A dog runs.", "parameters": {"max_new_tokens": 16, "details": True}, "stream": True},
    )


class StreamedTextGenerationBody(TextGenerationBody):
    stream: Annotated[Literal[True], Field(description="Always true.")] = True

    EXAMPLES = ({"inputs": "A dog runs.", "parameters": {"max_new_tokens": 16}},)


class TextGenerationToken(TypedDict):
    id: Annotated[int, Field(description="Token id.")]
    text: Annotated[str, Field(description="Text of the token.")]
    logprob: Annotated[float, Field(description="Natural logarithm of its probability.")]
    special: Annotated[bool, Field(description="True for special tokens.")]


class TextGenerationDetails(TypedDict):
    finish_reason: Annotated[Literal["length", "eos_token", "stop_sequence"], Field(description="Reason for the end.")]
    generated_tokens: Annotated[int, Field(description="Number of generated tokens.")]
    seed: Annotated[int | None, Field(description="Seed of the sampling; null without sampling.")]
    prefill: Annotated[list[TextGenerationToken], Field(description="Always empty.")]
    tokens: Annotated[list[TextGenerationToken], Field(description="Generated tokens.")]
    top_tokens: NotRequired[
        Annotated[
            list[list[TextGenerationToken]],
            Field(description="Top alternatives of each token; only with `top_n_tokens`."),
        ]
    ]


class TextGenerationResponse(TypedDict):
    generated_text: Annotated[str, Field(description="Generated text.")]
    details: NotRequired[Annotated[TextGenerationDetails, Field(description="Details; only with `details`.")]]


class TextGenerationError(BaseModel):
    error: Annotated[str, Field(description="Explanation, after the path of the value at fault.")]
    error_type: Annotated[
        Literal["validation", "overloaded", "generation", "incomplete_generation"],
        Field(description="Type of the error."),
    ]


FINISH_REASONS = {"eos": "eos_token", "stop": "stop_sequence", "length": "length"}
ERRORS = typed_errors(
    {"invalid_request_error": "validation", "overloaded_error": "overloaded", "server_error": "generation"},
    {"deadline_exceeded": "incomplete_generation"},
    TextGenerationError,
)


async def generate_text(
    call: Call, body: TextGenerationBody, model: ModelInQuery
) -> TextGenerationResponse | EventStream:
    """Generate a text from a prompt.

    The prompt is the source of an encoder-decoder, or the text that a decoder-only model continues.

    With `stream: true` the response is `text/event-stream`: one event for each token, the last with
    the whole text.
    """
    parameters = body.parameters or TextGenerationParameters()
    languages = parameters.source_language, parameters.target_language
    if model is None and languages != (None, None):
        served = await generating_model(call, None, *languages)
    else:
        served = await model_of_query(call, model, "generate")
    if parameters.return_full_text:
        check_continues_prompt(served, "parameters.return_full_text")
    generation = TgiResponse(served, body.inputs, parameters)
    requested = given_parameters(parameters)
    if needs_samples(requested, ("temperature", *FILTERS)):
        requested["do_sample"] = True
    generate_parameters = parameters_for(served, requested, stream=bool(body.stream), is_lenient=True)
    inputs = Texts((body.inputs,), is_list=False, are_prompts=True)
    if body.stream:
        return EventStream(await stream(call, served, inputs, generate_parameters), generation)
    (output,) = (await generate_texts(call, served, inputs, generate_parameters)).outputs
    return generation.whole(output)


async def stream_text(call: Call, body: StreamedTextGenerationBody, model: ModelInQuery) -> EventStream:
    """Generate a text as a stream: one event for each token, the last one with the whole text."""
    return cast(EventStream, await generate_text(call, body, model))


class TgiResponse(EventEncoder):
    """One response, whole or as the events of a stream."""

    def __init__(self, model: ServedModel, prompt: str, parameters: TextGenerationParameters) -> None:
        self._model = model
        self._before = prompt if parameters.return_full_text else ""
        self._returns_details = bool(parameters.details)
        self._returns_top_tokens = bool(parameters.top_logprobs)
        self._blank = ""
        self._last: dict[str, Any] = {}  # the last event

    def whole(self, output: GenerateOutput) -> TextGenerationResponse:
        tokens = output.tokens
        response: TextGenerationResponse = {
            "generated_text": self._before + (blank_before(self._model, tokens[0]) if tokens else "") + output.text
        }
        if self._returns_details:
            details = self._details(output, len(tokens))
            details |= {"prefill": [], "tokens": [self._token(token) for token in tokens]}
            if self._returns_top_tokens:
                details["top_tokens"] = [self._top_tokens(token) for token in tokens]
            response["details"] = cast(Any, details)
        return response

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        token, text = event.token, event.text
        if sequence.num_tokens == 1:
            self._blank = blank_before(self._model, token)
            text = self._blank + text
        # Clients join the texts of the tokens, so each is the new text, as in the native stream.
        self._last = {"index": sequence.num_tokens, "token": {**self._token(token), "text": text}}
        if self._returns_top_tokens:
            self._last["top_tokens"] = self._top_tokens(token)
        self._last |= {"generated_text": None, "details": None}
        return b"" if sequence.has_last_token else event_of(self._last)  # `end` sends the last one with the text

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        details = self._details(event, sequence.num_tokens) | {"input_length": sequence.num_input_tokens}
        text = self._before + self._blank + event.text
        return event_of(self._last | {"generated_text": text, "details": details if self._returns_details else None})

    def _details(self, ended: GenerateOutput | StreamEnd, num_tokens: int) -> dict[str, Any]:
        return {
            "finish_reason": FINISH_REASONS[ended.finish_reason],
            "generated_tokens": num_tokens,
            "seed": ended.seed,
        }

    def _token(self, token: OutputToken) -> TextGenerationToken:
        is_special = token.id in self._model.target_tokenizer.special_ids
        return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": is_special}

    def _top_tokens(self, token: OutputToken) -> Sequence[TextGenerationToken]:
        return [self._token(alternative) for alternative in alternatives_of(token)]


_post = partial(Endpoint, "POST", errors=PARAMETER_ERRORS)
ENDPOINTS = (
    _post("/generate", generate_text, TextGenerationResponse, media_types=(JSON, EVENTS)),
    _post("/generate_stream", stream_text, media_types=(EVENTS,)),
)
