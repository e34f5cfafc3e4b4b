"""POST /v1/tag: labeled tokens of texts, merged into entities with character ranges."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sightline.base.text.tokenizer import TextTokenizer, TokenSpan
from sightline.service.api.endpoint import TASK_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName, Truncate
from sightline.service.body_fields import RequestBody
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import INLINE_CHARACTERS, Ids
from sightline.service.inference.labels import apply_function
from sightline.service.inference.results import Outputs
from sightline.service.inference.source_encoding import encode_sources, read_sources
from sightline.service.tasks.tokens import BYTES_PER_SPAN

Aggregation = Literal["none", "simple"]
OUTSIDE = ("O",)  # label of tokens that belong to no entity

AggregationName = Annotated[
    Aggregation,
    Field(
        description="`simple` merges adjacent tokens with the same label, whose prefixes B- and I- mark the first and "
        "the further tokens of an entity; `none` returns each token."
    ),
]
IgnoreLabels = Annotated[
    list[Annotated[str, Field(max_length=128)]],
    Field(max_length=1024, fail_fast=True, description="Labels of entities that are left out."),
]


class TagBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    aggregation: AggregationName = "simple"
    ignore_labels: IgnoreLabels = Field(default=list(OUTSIDE))
    truncate: Truncate = False

    EXAMPLES = (
        {"inputs": "A dog runs in Berlin."},
        {"inputs": ["A dog runs in Berlin."], "aggregation": "none", "ignore_labels": []},
    )


@dataclass(frozen=True)
class Entity:
    """A part of a text with a label. Indices count characters."""

    label: Annotated[
        str, Field(description="Label; with aggregation simple, without the prefix B- or I- of its tokens.")
    ]
    score: Annotated[float, Field(description="Probability of the label; the mean over the tokens of the entity.")]
    text: Annotated[str, Field(description="Text of the entity, without whitespace at either end.")]
    start: Annotated[
        int,
        Field(
            description="Index of its first character in the input. As in Transformers, the space before a word counts "
            "if the tokenizer has it in the token of the word."
        ),
    ]
    end: Annotated[int, Field(description="Index after its last character in the input.")]
    token: Annotated[int, Field(description="Index of its first token, special tokens included.")]


@dataclass(frozen=True)
class TagOutput:
    """The entities of one input."""

    index: Annotated[int, Field(description="Index of the input.")]
    entities: Annotated[list[Entity], Field(description="Entities in the order of the text.")]


@dataclass(frozen=True)
class TagResult(Outputs):
    """The entities of a call's inputs."""

    outputs: Annotated[list[TagOutput], Field(description="One output for each input, in order.")]


async def tag_texts(call: Call, body: TagBody) -> TagResult:
    """Find the entities of each input, with their positions in the text."""
    model, texts = await call.model(body.model, "tag"), body.inputs.texts
    tokenizer, labels = model.source_tokenizer, model.manifest.labels
    admitted, sources = await read_sources(call, model, body.inputs, truncate=body.truncate)
    num_tokens = sum(map(len, sources))
    call.response_memory.reserve(BYTES_PER_SPAN * num_tokens)

    spans = await call.tokenize(lambda: list(map(spans_of, repeat(tokenizer), texts, sources)), texts)

    def convert(index: int, result: Encoded) -> TagOutput:
        assert result.label_scores is not None
        entities = label_tokens(texts[index], spans[index], result.label_scores, labels)
        if body.aggregation == "simple":
            entities = merge_tokens(texts[index], entities)
        return TagOutput(index, [entity for entity in entities if entity.label not in body.ignore_labels])

    return TagResult(model.name, *await encode_sources(admitted, sources, convert, return_labels=True))


def spans_of(tokenizer: TextTokenizer, text: str, ids: Ids) -> list[TokenSpan]:
    """Return the character range of each token of an input; `ids` may be a truncated input."""
    # Tokens at the start of a text do not depend on text far behind them, see `encode_truncated`.
    if len(text) > INLINE_CHARACTERS:  # in another thread, see `Call.tokenize`
        text = text[: 4 * len(ids) * tokenizer.longest_token_bytes]
    spans = tokenizer.encode_offsets(text)
    if len(spans) <= len(ids):
        return spans
    # A final special token was kept when the input was truncated.
    return [*spans[: len(ids) - 1], spans[-1] if ids[-1] in tokenizer.special_ids else spans[len(ids) - 1]]


def label_tokens(
    text: str, spans: Sequence[TokenSpan], logprobs: NDArray[np.float32], labels: Sequence[str]
) -> list[Entity]:
    """Return each token as an entity, with its most probable label by `logprobs` (S, C).

    Special tokens are left out.
    """
    scores = apply_function(logprobs, "softmax")
    tokens = []
    for index, (span, row) in enumerate(zip(spans, scores, strict=True)):
        if span.is_special:
            continue
        best = int(row.argmax())
        part = text[span.start : span.end].strip()
        tokens.append(Entity(labels[best], float(row[best]), part, span.start, span.end, index))
    return tokens


def merge_tokens(text: str, tokens: Sequence[Entity]) -> list[Entity]:
    """Merge labeled tokens into entities, as the aggregation "simple" of `transformers` does.

    Adjacent tokens whose labels are equal without the prefixes B- and I- are one entity, unless the
    later token has the prefix B-.
    """
    groups: list[list[Entity]] = []
    for token in tokens:
        continues = bool(groups) and not token.label.startswith("B-")
        if continues and _without_prefix(groups[-1][-1].label) == _without_prefix(token.label):
            groups[-1].append(token)
        else:
            groups.append([token])
    return [_merged(text, group) for group in groups]


def _without_prefix(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _merged(text: str, tokens: Sequence[Entity]) -> Entity:
    start, end, label = tokens[0].start, tokens[-1].end, _without_prefix(tokens[0].label)
    score = sum(token.score for token in tokens) / len(tokens)
    return Entity(label, score, text[start:end].strip(), start, end, tokens[0].token)


ENDPOINTS = (Endpoint("POST", "/v1/tag", tag_texts, TagResult, errors=TASK_ERRORS),)
