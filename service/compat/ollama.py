"""Ollama's API: text and dialogues as JSON lines, embeddings, and properties of the models.

In a request, null equals omitting the field. Responses, whose types the clients of Ollama have, are
plain objects here; times of a call are in nanoseconds.
"""

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from sightline import __version__
from sightline.base.bundle import Manifest, Task
from sightline.base.text.prompt import Dialogue
from sightline.base.text.tool_calls import CallPart
from sightline.service import parameters
from sightline.service.api.endpoint import (
    CURL_JSON,
    ENGINE_ERRORS,
    JSON,
    NDJSON,
    OUTPUT_ERRORS,
    PARAMETER_ERRORS,
    Call,
    Endpoint,
    EventEncoder,
    EventStream,
    line_of,
)
from sightline.service.api.messages import DIALOGUE, MAX_MESSAGES, Message, check_dialogue, dialogue_of
from sightline.service.api.tools import OfferedTools, ToolDefinitions, offer_tools
from sightline.service.api_errors import ApiError, ErrorCode
from sightline.service.body_fields import (
    MAX_INPUTS,
    NOT_BLANK,
    RequestBody,
    Text,
    Texts,
    check_texts_without_ids,
    construct,
    field_error,
    must_equal,
    paths_of,
)
from sightline.service.compat.common import (
    FINISH_REASONS,
    Dimensions,
    Ignored,
    blank_before,
    parameters_by_temperature,
)
from sightline.service.constraints import ANY_OBJECT, Constraint, check_schema
from sightline.service.inference.results import OutputToken, TimingsMs, Usage, alternatives_of
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.inference.service import ServedModel
from sightline.service.inference.streaming import StreamedSequence, StreamEnd, StreamToken, stream
from sightline.service.parameters import MODEL_DEFAULTS, GenerateParameters, given_parameters
from sightline.service.tasks.encode import EncodeBody, encode

Json = dict[str, Any]  # a response, or a line of one
Content = Callable[[str, Sequence[CallPart]], Json]  # returns the fields of a text and of complete calls

LATEST = ":latest"  # tag of the model names that clients show
NEVER = "9999-12-31T23:59:59Z"  # time at which a model is removed from memory
CAPABILITIES: tuple[tuple[Task, str], ...] = (("generate", "completion"), ("encode", "embedding"))

RequiredModel = Annotated[
    str, Field(min_length=1, max_length=128, description="Name of the model; the tag `:latest` may follow it.")
]
EmptyOrText = Annotated[str, Field(json_schema_extra={"pattern": f"^$|{NOT_BLANK}"})]


class DecodingOptions(RequestBody):
    """Options of a generation. Those that are absent have the defaults of the model."""

    max_new_tokens: Annotated[int, Field(ge=-2, le=parameters.MAX_TOKENS)] | None = Field(
        default=None,
        alias="num_predict",
        description="Maximum number of generated tokens. The default is that of the model; without one, and with 0, -1 "
        "and -2, it is as many as the model can generate.",
    )
    temperature: Annotated[float, Field(ge=0, le=parameters.MAX_TEMPERATURE)] | None = Field(
        default=None,
        description="Values above 0 sample each token, and 0 takes the most probable one. The default is 0, unless the "
        "model samples by default, or `top_k`, `top_p`, `min_p` or `typical_p` need samples.",
    )
    top_k: parameters.TopK | None = None
    top_p: parameters.TopP | None = None
    min_p: parameters.MinP | None = None
    typical_p: parameters.TypicalP | None = None
    seed: Annotated[parameters.Seed | None, Field(description="Seed of the sampling; random if absent.")] = None
    stop: parameters.Stop | None = None
    repetition_penalty: parameters.RepetitionPenalty | None = Field(default=None, alias="repeat_penalty")
    repeat_last_n: Annotated[Any, must_equal(-1)] = None
    presence_penalty: parameters.PresencePenalty | None = None
    frequency_penalty: parameters.FrequencyPenalty | None = None
    tfs_z: Annotated[Any, must_equal(1)] = None
    mirostat: Annotated[Any, must_equal(0)] = None
    mirostat_tau: Ignored[float] = None
    mirostat_eta: Ignored[float] = None
    penalize_newline: Ignored[bool] = None
    num_keep: Ignored[int] = None
    num_ctx: int | None = Field(
        default=None, description="Accepted for compatibility; ignored. The limits of the model apply."
    )
    num_batch: Ignored[int] = None
    num_gpu: Ignored[int] = None
    main_gpu: Ignored[int] = None
    num_thread: Ignored[int] = None
    numa: Ignored[bool] = None
    low_vram: Ignored[bool] = None
    f16_kv: Ignored[bool] = None
    logits_all: Ignored[bool] = None
    vocab_only: Ignored[bool] = None
    use_mmap: Ignored[bool] = None
    use_mlock: Ignored[bool] = None
    embedding_only: Ignored[bool] = None


OPTION_NAMES = paths_of(DecodingOptions)


def _check_format(value: Any) -> Constraint | None:
    if isinstance(value, str | None):
        if value not in (None, "", "json"):
            raise field_error("invalid_parameter", 'It must be "json" or a JSON Schema.')
        return ANY_OBJECT if value else None
    return construct(Constraint, json_schema=check_schema(value))


Format = Literal["", "json"] | dict[str, Any] | None


class OllamaBody(RequestBody):
    """Fields that both text endpoints share."""

    model: RequiredModel
    stream: bool | None = Field(default=None, description="Send JSON lines as the text is generated; the default.")
    options: DecodingOptions | None = Field(default=None, description="Generation parameters.")
    logprobs: bool | None = Field(default=None, description="Return the log-probability of each token.")
    top_logprobs: parameters.TopLogprobs | None = Field(
        default=None, description="Number of top alternatives returned for each token; needs `logprobs: true`."
    )
    keep_alive: Ignored[float | str] = None
    constraint: Annotated[Constraint | None, PlainValidator(_check_format, json_schema_input_type=Format)] = Field(
        default=None, alias="format", description="Format of the text: `json`, any JSON object, or a JSON Schema."
    )
    think: Annotated[Any, must_equal(False)] = None
    truncate: Ignored[bool] = None
    shift: Ignored[bool] = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise field_error("invalid_parameter", "top_logprobs needs logprobs: true.", "top_logprobs")
        return self


class PromptBody(OllamaBody):
    inputs: EmptyOrText | None = Field(
        default=None, alias="prompt", description="Prompt; without one, or with an empty one, the model is only loaded."
    )
    system: str | None = Field(default=None, description="System message; only for models with a chat template.")
    raw: bool | None = Field(default=None, description="Do not apply the model's chat template to the prompt.")
    suffix: Annotated[Any, must_equal("")] = None
    template: Annotated[Any, must_equal("")] = None
    context: Annotated[Any, must_equal([])] = None
    images: Annotated[Any, must_equal([])] = None

    EXAMPLES = (
        {"model": "multi30k-en-de", "prompt": "A man is riding a bicycle.", "stream": False},
        {
            "model": "multi30k-en-de",
            "prompt": "A dog runs.",
            "options": {"temperature": 0.8, "top_k": 40, "seed": 7, "num_predict": 16},
        },
    )


class DialogueMessage(Message):
    """A message of a dialogue; Ollama has fields of its own."""

    images: Annotated[Any, must_equal([])] = None
    thinking: Annotated[Any, must_equal("")] = None
    tool_name: Annotated[str, Field(max_length=128, description="Name of the tool that has this result.")] | None = None

    @property
    def author(self) -> str | None:
        return self.tool_name or self.name


class DialogueBody(OllamaBody):
    inputs: Annotated[list[DialogueMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        default=None, alias="messages", description=f"{DIALOGUE} Without messages, the model is only loaded."
    )
    tools: ToolDefinitions | None = Field(default=None, description="Functions that the model may call.")

    EXAMPLES = ({"model": "smalltalk-chat-gatt", "messages": [{"role": "user", "content": "Hello!"}], "stream": False},)

    @model_validator(mode="after")
    def _check_dialogue(self) -> Self:
        if self.inputs:
            check_dialogue(self.inputs)
        return self


def _check_embedded(value: Any) -> Texts | None:
    """Check texts to encode; there are none in an empty text or list."""
    return None if value in (None, "", []) else check_texts_without_ids(value)


Embedded = EmptyOrText | Annotated[list[Text], Field(max_length=MAX_INPUTS)] | None


class OllamaEmbedBody(RequestBody):
    model: RequiredModel
    inputs: Annotated[Texts | None, PlainValidator(_check_embedded, json_schema_input_type=Embedded)] = Field(
        default=None, alias="input", description="Text or texts to encode; without any, the model is only loaded."
    )
    truncate: bool | None = Field(
        default=None, description="Cut inputs that are too long instead of rejecting them; the default is true."
    )
    dimensions: Dimensions = None
    options: Ignored[DecodingOptions] = None
    keep_alive: Ignored[float | str] = None

    EXAMPLES = (
        {"model": "multi30k-en-de", "input": ["A dog runs.", "A cat sleeps."]},
        {"model": "multi30k-en-de", "input": "A dog runs.", "truncate": False},
    )


class OllamaEmbeddingBody(RequestBody):
    model: RequiredModel
    inputs: EmptyOrText | None = Field(
        default=None, alias="prompt", description="Text to encode; without one, the model is only loaded."
    )
    options: Ignored[DecodingOptions] = None
    keep_alive: Ignored[float | str] = None

    EXAMPLES = ({"model": "multi30k-en-de", "prompt": "A dog runs."},)


class ShowBody(RequestBody):
    """Name of a model. Ollama's own client sends all fields, most of them empty."""

    model: Annotated[str, Field(max_length=128)] | None = Field(
        default=None, description="Name of the model; the tag `:latest` may follow it."
    )
    name: Annotated[str, Field(max_length=128)] | None = Field(default=None, description="Older name of `model`.")
    verbose: Ignored[bool] = None
    system: Annotated[Any, must_equal("")] = None
    template: Annotated[Any, must_equal("")] = None
    options: Ignored[DecodingOptions] = None

    EXAMPLES = ({"model": "multi30k-en-de"},)

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if not (self.model or self.name):
            raise field_error("invalid_parameter", "It is required.", "model")
        return self


async def generate_text(call: Call, body: PromptBody) -> Json | EventStream:
    """Continue a prompt, or reply to it if the model has a chat template.

    Unless `stream` is false, the response is `application/x-ndjson`: one JSON line for each token,
    then a line with `done: true` and the token counts.
    """
    model = await call.model(name_of(call, body.model), "generate")
    response = OllamaResponse(call, model, body, lambda text, _: {"response": text})
    if not body.inputs:
        return response.loaded()
    prompt = _prompt(model, body, check_blank(body.inputs))
    return await response.of(prompt, continues=isinstance(prompt, Texts))


async def chat(call: Call, body: DialogueBody) -> Json | EventStream:
    """Reply to the last message of a dialogue.

    Unless `stream` is false, the response is `application/x-ndjson`: one JSON line for each token,
    then a line with `done: true` and the token counts.
    """
    model = await call.model(name_of(call, body.model), "generate")
    tools = offer_tools(model, body.tools)
    response = OllamaResponse(call, model.with_markers() if tools else model, body, _message, tools)
    if not body.inputs:
        return response.loaded()
    continues = body.inputs[-1].role == "assistant"
    dialogue = dialogue_of(model, body.inputs, tools)
    return await response.of(dialogue, continues=continues)


def _message(text: str, calls: Sequence[CallPart]) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if calls:
        functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
        message["tool_calls"] = [{"function": function} for function in functions]
    return {"message": message}


def _prompt(model: ServedModel, body: PromptBody, text: str) -> Texts | Dialogue:
    if model.chat is not None and not body.raw:
        system = [{"role": "system", "content": body.system}] if body.system else []
        return Dialogue([*system, {"role": "user", "content": text}])
    if body.system:
        reason = "It cannot be combined with raw: true." if model.chat else f"{model.name} has no chat template."
        raise ApiError("unsupported_parameter", f"{reason} Leave it out.", path="system")
    return Texts((text,), is_list=False, are_prompts=True)


def check_blank(text: str) -> str:
    """Return a text; raise `ApiError` if it contains only whitespace."""
    if not text.strip():
        raise ApiError("empty_input", field="inputs")
    return text


def decoding_parameters(body: OllamaBody, model: ServedModel) -> GenerateParameters:
    """Return the parameters of a body; the model's defaults are used for those that are absent."""
    options = body.options or DecodingOptions()
    requested = given_parameters(options) | {"top_logprobs": body.top_logprobs or 0, "constraint": body.constraint}
    length = model.manifest.generation.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    if length is None or length < 1:
        requested["max_new_tokens"] = model.manifest.limits.max_target_tokens
    return parameters_by_temperature(model, requested, options.temperature, stream=body.stream is not False)


class OllamaResponse(EventEncoder):
    """One text, whole or as JSON lines."""

    def __init__(
        self, call: Call, model: ServedModel, body: OllamaBody, content: Content, tools: OfferedTools | None = None
    ) -> None:
        """Prepare a response; `content` returns the fields that hold a text and calls."""
        self._call = call
        self._model = model
        self._body = body
        self._parameters = decoding_parameters(body, model)
        self._content = content
        self._parser = tools.parser() if tools else None
        self._continues = False  # the next token follows a text of the request

    async def of(self, inputs: Texts | Dialogue, *, continues: bool) -> Json | EventStream:
        """Generate from the inputs and return the response.

        The text has a space before it if it continues a text that needs one.
        """
        self._continues = continues
        is_whole = bool(self._body.logprobs)
        if self._body.stream is not False:
            events = await stream(self._call, self._model, inputs, self._parameters, is_whole=is_whole)
            return EventStream(events, self, NDJSON)
        result = await generate_texts(self._call, self._model, inputs, self._parameters, is_whole=is_whole)
        (output,) = result.outputs
        end = self._end(output.finish_reason, result.usage, result.timings_ms)
        return self._part(self._blank_before(output.tokens) + output.text, output.tokens, is_end=True) | end

    def loaded(self) -> Json:
        """Return the response to a request without a prompt, which only loads the model."""
        return self._part("", []) | {"done": True, "done_reason": "load"}

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        return line_of(self._part(self._blank_before([event.token]) + event.text, [event.token]))

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        part = self._part("", [], is_end=True)
        return line_of(part | self._end(event.finish_reason, event.usage, event.timings_ms))

    def error(self, body: bytes) -> bytes:
        return body + b"\n"

    def _blank_before(self, tokens: Sequence[OutputToken]) -> str:
        continues, self._continues = self._continues, False
        return blank_before(self._model, tokens[0]) if continues and tokens else ""

    def _part(self, text: str, tokens: Sequence[OutputToken], *, is_end: bool = False) -> Json:
        text, calls = self._parser.read(text, is_end=is_end) if self._parser else (text, [])
        content = self._content(text, calls)
        part = {"model": self._body.model, "created_at": rfc3339(time.time()), **content, "done": False}
        return part | {"logprobs": [self._logprob(one) for one in tokens]} if self._body.logprobs and tokens else part

    def _logprob(self, token: OutputToken) -> Json:
        logprob: Json = {"token": token.text, "logprob": token.logprob}
        if self._body.top_logprobs:
            logprob["top_logprobs"] = [{"token": top.text, "logprob": top.logprob} for top in alternatives_of(token)]
        return logprob

    def _end(self, reason: str, usage: Usage, timings: TimingsMs) -> Json:
        return {
            "done": True,
            "done_reason": FINISH_REASONS[reason],
            "total_duration": nanoseconds(timings.total),
            "load_duration": 0,
            "prompt_eval_count": usage.input_tokens,
            "prompt_eval_duration": nanoseconds(timings.encode),
            "eval_count": usage.output_tokens,
            "eval_duration": nanoseconds(timings.decode),
        }


async def embed(call: Call, body: OllamaEmbedBody) -> Json:
    """Encode each input to one vector of length 1, with the model's pooling and default prompt."""
    model, truncate = await call.model(name_of(call, body.model), "encode"), body.truncate is not False
    result = None
    if body.inputs is not None:
        options = construct(EncodeBody, model=model.name, inputs=body.inputs, normalize=True, truncate=truncate)
        result = await encode(call, options, body.dimensions)
    return {
        "model": body.model,
        "embeddings": result.embeddings if result else [],
        "total_duration": nanoseconds((result.timings_ms if result else call.timings([])).total),
        "load_duration": 0,
        "prompt_eval_count": result.usage.input_tokens if result else 0,
    }


async def embed_prompt(call: Call, body: OllamaEmbeddingBody) -> Json:
    """Encode a text to a vector, cut if it is too long, with the model's own settings."""
    model = await call.model(name_of(call, body.model), "encode")
    if not body.inputs:
        return {"embedding": []}
    texts = Texts.one(check_blank(body.inputs))
    result = await encode(call, construct(EncodeBody, model=model.name, inputs=texts, truncate=True))
    return {"embedding": result.embeddings[0]}


async def tags(call: Call) -> Json:
    """List the models."""
    return {"models": [tag_of(manifest) for manifest in call.service.require_manifests()]}


async def loaded_tags(call: Call) -> Json:
    """List the models that are in memory."""
    call.service.require_manifests()
    models = []
    for listed in call.service.models.values():
        if listed.loaded is not None:
            tag, is_on_gpu = tag_of(listed.manifest), listed.loaded.model.provider == "cuda"
            size, length = tag["size"], listed.manifest.limits.max_source_tokens
            models.append({**tag, "expires_at": NEVER, "size_vram": size if is_on_gpu else 0, "context_length": length})
    return {"models": models}


async def show(call: Call, body: ShowBody) -> Json:
    """Describe one model: its sizes, limits, defaults, chat template and capabilities."""
    manifest = call.service.find_manifest(name_of(call, body.model or body.name or ""))
    limits, family = manifest.limits, family_of(manifest)
    capabilities = [name for task, name in CAPABILITIES if task in manifest.tasks]
    if manifest.chat is not None and manifest.chat.takes_tools:
        capabilities.append("tools")
    defaults = ((OPTION_NAMES.get(name), getattr(manifest.generation, name)) for name in MODEL_DEFAULTS)
    return {
        "license": manifest.license,
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults if name and value is not None),
        "template": "" if manifest.chat is None else manifest.chat.program,
        "details": details_of(manifest),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": manifest.parameters,
            f"{family}.context_length": limits.max_source_tokens,
            f"{family}.vocab_size": limits.vocabulary,
        },
        "capabilities": capabilities,
        "modified_at": rfc3339(manifest.created),
    }


async def version(call: Call) -> Json:
    """Return the version of the service."""
    return {"version": __version__}


def name_of(call: Call, name: str) -> str:
    """Return the name of a served model for a name that may have the tag `:latest`."""
    return name if name in call.service.models else name.removesuffix(LATEST)


def tag_of(manifest: Manifest) -> Json:
    return {
        "name": manifest.name,
        "model": manifest.name,
        "modified_at": rfc3339(manifest.created),
        "size": sum(record.bytes for record in manifest.files.values()),
        "digest": manifest.digest,
        "details": details_of(manifest),
    }


def family_of(manifest: Manifest) -> str:
    return manifest.origin.family if manifest.origin else manifest.architecture


def details_of(manifest: Manifest) -> Json:
    family = family_of(manifest)
    return {
        "parent_model": "",
        "format": "onnx",
        "family": family,
        "families": [family],
        "parameter_size": size_text(manifest.parameters),
        "quantization_level": manifest.dtype,
    }


def size_text(count: int) -> str:
    """Return a number of weights, such as `4.9M`."""
    scale, unit = next((pair for pair in ((10**9, "B"), (10**6, "M"), (10**3, "K")) if count >= pair[0]), (1, ""))
    return f"{count / scale:.1f}{unit}" if unit else str(count)


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(milliseconds: float) -> int:
    return round(1e6 * milliseconds)


_POST: dict[str, Any] = {"body_format": CURL_JSON}
_STREAMED = {**_POST, "errors": PARAMETER_ERRORS, "media_types": (JSON, NDJSON)}
_EMBEDDING_ERRORS: tuple[ErrorCode, ...] = ("model_not_found", "unsupported_task", *ENGINE_ERRORS, "response_too_large")
PREFIX = "/api/"
ENDPOINTS = (
    Endpoint("POST", "/api/generate", generate_text, Json, **_STREAMED),
    Endpoint("POST", "/api/chat", chat, Json, **_STREAMED),
    Endpoint("POST", "/api/embed", embed, Json, errors=OUTPUT_ERRORS, **_POST),
    Endpoint("POST", "/api/embeddings", embed_prompt, Json, errors=_EMBEDDING_ERRORS, **_POST),
    Endpoint("GET", "/api/tags", tags, Json, errors=("loading",)),
    Endpoint("GET", "/api/ps", loaded_tags, Json, errors=("loading",)),
    Endpoint("POST", "/api/show", show, Json, errors=("model_not_found", "loading"), **_POST),
    Endpoint("GET", "/api/version", version, Json),
)
