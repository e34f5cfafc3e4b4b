"""POST /v1/fill-mask: the most probable tokens at the places that a text leaves open."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api.endpoint import TASK_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import Ids
from sightline.service.inference.labels import apply_function
from sightline.service.inference.results import BYTES_PER_TOKEN, FLOAT_BYTES, Outputs
from sightline.service.inference.source_encoding import encode_sources, read_sources

MAX_MASKS = 16  # of one input
BYTES_PER_SCORE = 3 * FLOAT_BYTES  # a logit, and its probability in float64
BYTES_PER_CHARACTER = 8  # of a text in a response, and of its JSON

Target = Annotated[str, Field(min_length=1, max_length=256)]
TopK = Annotated[int, Field(ge=1, le=100, description="Number of tokens for each mask.")]


Targets = Annotated[
    list[Target],
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=Target | list[Target]
    ),
    Field(
        min_length=1,
        max_length=1024,
        description="Words to choose from, or names of tokens in the vocabulary. Each must be one token.",
    ),
]


class FillMaskBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    top_k: TopK = 5
    targets: Targets | None = None

    EXAMPLES = (
        {"inputs": "A dog [MASK] in the park."},
        {"inputs": ["A dog [MASK] in the park."], "targets": ["runs", "sleeps"], "top_k": 1},
    )


@dataclass(frozen=True)
class FilledToken:
    """A token for a mask."""

    id: Annotated[int, Field(description="Token id.")]
    text: Annotated[str, Field(description="Text of the token.")]
    score: Annotated[float, Field(description="Its probability among all tokens.")]
    sequence: Annotated[str, Field(description="The input with this token, as its tokens read.")]


@dataclass(frozen=True)
class FillMaskOutput:
    """The tokens for the masks of one input."""

    index: Annotated[int, Field(description="Index of the input.")]
    masks: Annotated[list[list[FilledToken]], Field(description="For each mask, the most probable tokens first.")]


@dataclass(frozen=True)
class FillMaskResult(Outputs):
    """The tokens for the masks of a call's inputs."""

    outputs: Annotated[list[FillMaskOutput], Field(description="One output for each input, in order.")]


async def fill_masks(call: Call, body: FillMaskBody) -> FillMaskResult:
    """Find the most probable tokens for the masks of each input.

    A mask is the name of the model's mask token, such as `[MASK]` or `<mask>`.
    """
    model, inputs = await call.model(body.model, "fill-mask"), body.inputs
    manifest, tokenizer = model.manifest, model.source_tokenizer
    mask_id = manifest.tokens.mask_id
    assert mask_id is not None, "a model with this task has a mask token"
    allowed = None if body.targets is None else _read_targets(tokenizer, body.targets)
    admitted, sources = await read_sources(call, model, inputs, mask_id=mask_id)
    places = [tuple(index for index, id_ in enumerate(source) if id_ == mask_id) for source in sources]
    vocabulary = min(len(tokenizer), manifest.limits.vocabulary)
    num_found = min(body.top_k, vocabulary if allowed is None else len(allowed))
    for index, (text, positions) in enumerate(zip(inputs.texts, places, strict=True)):
        if not 1 <= len(positions) <= MAX_MASKS:
            message = (
                f"It must have 1 to {MAX_MASKS} masks, the token {tokenizer.name(mask_id)} of {model.name}, got "
                f"{len(positions)}."
            )
            raise ApiError("invalid_parameter", message, field="inputs", index=inputs.index(index))
        num_bytes = BYTES_PER_TOKEN + BYTES_PER_CHARACTER * len(text)
        call.response_memory.reserve(
            len(positions) * (num_found * num_bytes + BYTES_PER_SCORE * manifest.limits.vocabulary)
        )

    def convert(index: int, result: Encoded) -> FillMaskOutput:
        assert result.predictions is not None
        return FillMaskOutput(
            index,
            fill(
                tokenizer, sources[index], places[index], result.predictions, num_found, allowed, manifest.tokens.pad_id
            ),
        )

    return FillMaskResult(model.name, *await encode_sources(admitted, sources, convert, predicted=places))


def _read_targets(tokenizer: TextTokenizer, targets: Sequence[str]) -> list[int]:
    """Return the ids, in ascending order, of words that are one token each, or names of tokens."""
    target_ids = set()
    for index, target in enumerate(targets):
        id_ = tokenizer.token_id(target)
        ids = tokenizer.encode(target, add_special_tokens=False) if id_ is None else [id_]
        if len(ids) != 1:
            message = f"It is {len(ids)} tokens of this model, and must be one. POST /v1/tokenize shows the tokens."
            raise ApiError("invalid_parameter", message, field="targets", index=index)
        target_ids.add(ids[0])
    return sorted(target_ids)


def fill(
    tokenizer: TextTokenizer,
    ids: Ids,
    places: Sequence[int],
    logits: NDArray[np.float32],
    count: int,
    allowed: Sequence[int] | None,
    pad_id: int,
) -> list[list[FilledToken]]:
    """Return the most probable tokens for each mask of a text, by its logits (masks, V).

    The other masks of a text stay masks in the sequences, which show no padding (`pad_id`). The
    tokens are chosen from the ids `allowed`; from all if it is None.
    """
    masks = []
    for place, scores in zip(places, apply_function(logits, "softmax"), strict=True):
        candidates = np.arange(min(len(scores), len(tokenizer))) if allowed is None else np.array(allowed)
        best = candidates[np.argsort(-scores[candidates], kind="stable")[:count]]
        tokens = []
        for id_ in best.tolist():
            filled = [token_id for token_id in (*ids[:place], id_, *ids[place + 1 :]) if token_id != pad_id]
            sequence = tokenizer.decode(filled, skip_special_tokens=len(places) == 1)
            text = tokenizer.decode([id_], skip_special_tokens=False)
            tokens.append(FilledToken(id_, text, float(scores[id_]), sequence))
        masks.append(tokens)
    return masks


ENDPOINTS = (Endpoint("POST", "/v1/fill-mask", fill_masks, FillMaskResult, errors=TASK_ERRORS),)
