"""What requests look like: every field known, every value of its own type and in its bounds."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, StrictInt, model_validator

from service.fields import (
    AT_MOST_ONE,
    MAX_INPUTS,
    NULL,
    TEXTS_SCHEMA,
    RequestBody,
    Text,
    Texts,
    Word,
    case,
    refusal,
    texts_named,
)
from service.parameters import Encoding, MapSelection, Parameters, ReturnAttention, TokenId, TopLogprobs

Pooling = Literal["mean", "first", "last", "max", "none"]
Side = Literal["source", "target"]

Inputs = Annotated[Texts, PlainValidator(texts_named("inputs")), TEXTS_SCHEMA]
Targets = Annotated[Texts, PlainValidator(texts_named("targets")), TEXTS_SCHEMA]
Truncate = Annotated[bool, Field(description="Cut what is too long instead of refusing it; the end token stays.")]
Model = Annotated[str | None, Field(max_length=128, description="Which model; the default model where it is absent.")]


class GenerateBody(RequestBody):
    model: Model = None
    inputs: Inputs
    parameters: Parameters = Field(default_factory=Parameters)
    stream: bool = False

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A man is riding a bicycle."},
                {
                    "inputs": ["A dog runs.", "Two children are playing."],
                    "parameters": {"max_new_tokens": 16, "do_sample": True, "top_p": 0.9, "seed": 7, "stop": "."},
                },
                {
                    "inputs": "A dog runs.",
                    "parameters": {
                        "num_beams": 4,
                        "num_return_sequences": 2,
                        "length_penalty": 0.6,
                        "early_stopping": True,
                        "repetition_penalty": 1.1,
                        "no_repeat_ngram_size": 3,
                        "suppress_tokens": [3],
                    },
                },
                {
                    "inputs": "A dog runs.",
                    "parameters": {
                        "target_prefix": "Ein",
                        "top_logprobs": 2,
                        "return_attention": {"kinds": ["cross"], "reduce": "mean"},
                    },
                },
            ],
            "anyOf": [case(stream={"const": False}), case(parameters=case(num_beams=AT_MOST_ONE))],
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        self.parameters.check_prefixes(len(self.inputs.texts))
        if self.stream and self.parameters.num_beams > 1:
            message = "A beam search knows its text at its end only: leave out stream, or num_beams."
            raise refusal("unsupported_parameter", message, "parameters", "num_beams")
        return self


class ScoreBody(RequestBody):
    model: Model = None
    inputs: Inputs
    targets: Targets
    top_logprobs: TopLogprobs = 0

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A dog runs.", "targets": "Ein Hund rennt."},
                {"inputs": ["A dog.", "A cat."], "targets": ["Ein Hund.", "Ein Hund."], "top_logprobs": 3},
            ],
            "anyOf": [case(inputs={"type": kind}, targets={"type": kind}) for kind in ("string", "array")],
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        inputs, targets = self.inputs, self.targets
        if (inputs.is_list, len(inputs.texts)) != (targets.is_list, len(targets.texts)):
            message = "inputs and targets are both one string, or both lists of the same length."
            raise refusal("invalid_parameter", message, "targets")
        return self


class EncodeBody(RequestBody):
    model: Model = None
    inputs: Inputs
    pooling: Pooling = "mean"
    normalize: bool = Field(default=False, description="Give each vector length 1.")
    encoding: Encoding = "float"
    truncate: Truncate = False

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": ["A dog runs."], "pooling": "mean", "normalize": True}]}
    )


class ClassifyBody(RequestBody):
    model: Model = None
    inputs: Inputs
    return_attention: ReturnAttention = Field(
        default=None, description="The encoder's attention maps of each input; true is all of them."
    )
    truncate: Truncate = False

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "sst2-sentiment", "inputs": ["a stirring , funny film .", "a long string of cliches ."]},
                {
                    "model": "sst2-sentiment",
                    "inputs": "a stirring , funny film .",
                    "return_attention": {"layers": [0], "reduce": "mean"},
                },
            ]
        }
    )


class SimilarBody(RequestBody):
    model: Model = None
    token: Annotated[Word | None, Field(description="Find what is nearest to this token.")] = None
    analogy: Annotated[
        list[Word] | None, Field(min_length=3, max_length=3, description="a, b, c: find d as in a : b :: c : d.")
    ] = None
    side: Side = "source"
    top_k: StrictInt = Field(default=10, ge=1, le=100)

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"token": "dog"}, {"analogy": ["boy", "boys", "dog"], "top_k": 3}],
            "anyOf": [
                case("token", token={"type": "string"}, analogy=NULL),
                case("analogy", token=NULL, analogy={"type": "array"}),
            ],
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.token is None) == (self.analogy is None):
            raise refusal("invalid_parameter", "Give one of token and analogy.", "token")
        return self


class AttentionBody(MapSelection):
    model: Model = None
    input: Text
    target: Annotated[Text | None, Field(description="Explain this text instead of what the model generates.")] = None
    parameters: Parameters = Field(
        default_factory=Parameters,
        json_schema_extra=case(
            num_return_sequences=AT_MOST_ONE,
            top_logprobs={"maximum": 0},
            return_attention={"const": False},
            target_prefix={"maxItems": 1},
        ),
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"input": "A dog runs.", "kinds": ["cross"], "reduce": "mean"},
                {"input": "A dog runs.", "target": "Ein Hund rennt.", "layers": [0], "encoding": "base64"},
                {"input": "A dog runs.", "kinds": ["cross"], "parameters": {"num_beams": 4}},
            ],
            "anyOf": [case(target=NULL), case(parameters=NULL)],
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        parameters = self.parameters
        if self.target is not None and "parameters" in self.model_fields_set:
            message = "With a target nothing is generated: leave parameters out."
            raise refusal("invalid_parameter", message, "parameters")
        parameters.check_prefixes(1)
        for name, is_wanted in (
            ("num_return_sequences", parameters.num_return_sequences > 1),
            ("top_logprobs", parameters.top_logprobs > 0),
            ("return_attention", parameters.return_attention is not None),
        ):
            if is_wanted:
                message = "This route answers with the maps of one target alone; /v1/generate has the rest."
                raise refusal("unsupported_parameter", message, "parameters", name)
        return self


class TokenizeBody(RequestBody):
    model: Model = None
    inputs: Inputs
    side: Side = "source"
    add_special_tokens: bool = True

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs.", "side": "source"}]})


class DetokenizeBody(RequestBody):
    model: Model = None
    ids: Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True)]],
        Field(max_length=MAX_INPUTS, fail_fast=True, json_schema_extra={"minItems": 1}),
    ]
    side: Side = "target"
    skip_special_tokens: bool = True

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [[5, 6, 2]], "side": "target"}]})
