"""Selection of the family of a checkpoint, and its description."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from export.errors import ImportFailedError
from export.families import Family, decoders, encoders, seq2seq
from export.families.description import Description
from export.families.token_types import type_separator
from export.sources.checkpoint import Config, Tensors

FAMILIES: tuple[Family, ...] = (*encoders.FAMILIES, *decoders.FAMILIES, *seq2seq.FAMILIES)


def find_family(config: Config) -> Family:
    """Return the family of a checkpoint by `model_type` and `architectures` of config.json.

    Raises:
        ImportFailedError: the architecture is not supported; the message lists those that are.
    """
    model_type = config.text("model_type", "")
    named = config.get("architectures", None) or ()
    supported = {family.name: family for family in FAMILIES}
    if model_type not in supported:
        code = "it needs Python code of its repository (auto_map), which is never run; " if "auto_map" in config else ""
        raise ImportFailedError(
            f"config.json: model_type {model_type!r} is not supported; {code}supported are "
            f"{', '.join(sorted(supported))}, and Firefox translation models"
        )
    family = supported[model_type]
    unsupported = [name for name in named if name not in family.architectures]
    if unsupported or not isinstance(named, list | tuple):
        raise ImportFailedError(
            f"config.json: architectures {named!r} of model_type {model_type!r} is not supported; supported are "
            f"{', '.join(family.architectures)}"
        )
    return family


def describe(
    family: Family,
    config: Config,
    tensors: Tensors,
    tokenizer: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
) -> Description:
    """Describe a checkpoint, and mark the tensors that do not change its outputs as known.

    Args:
        family: its family.
        config: config.json.
        tensors: the weights.
        tokenizer: tokenizer.json. It decides the token types of text pairs, and is only needed for
            models with token types.
        input_names: `model_input_names` of tokenizer_config.json, None if it has none.

    Raises:
        ImportFailedError: the checkpoint is not supported.
    """
    try:
        model = family.describe(config, tensors)
    except ImportFailedError:
        raise
    except ValueError as error:
        raise ImportFailedError(f"config.json: {error}") from None
    tensors.ignore(*family.ignored)
    stack = model.encoder
    if stack is None or not stack.embedding.has_types or config.integer("type_vocab_size", 2) < 2:
        return model
    separator = type_separator(tokenizer, input_names)
    return replace(model, encoder=replace(stack, embedding=replace(stack.embedding, type_separator=separator)))
