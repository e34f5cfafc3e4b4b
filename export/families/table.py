"""Selection of the family of a checkpoint, and its description."""

import fnmatch
import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.export.families import Family, blocks, deberta, decoders, encoders, gemma, rotary_encoders, seq2seq
from sightline.export.families.causal_encoders import as_reranker
from sightline.export.families.description import Description
from sightline.export.families.predictions import prediction_modules, with_predictions
from sightline.export.families.refused import REASONS
from sightline.export.families.shapes import check_shapes
from sightline.export.families.token_types import PairsUnsupportedError, type_separator
from sightline.export.families.weights import Weights
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.generation_settings import GENERATION_KEYS
from sightline.export.sources.opened_checkpoint import Config, Tensors, first_of

MAX_POSITIONS = 1 << 20
MAX_TABLE = 1 << 26  # numbers in a table with a row for each position: 2^20 positions with heads of 128

# Keys of config.json that do not change the outputs of a trained model of any family.
_HARMLESS = (
    "_name_or_path", "_commit_hash", "_attn_implementation*", "_flash_attn_2_enabled", "_num_labels", "*_token_id",
    "*dropout*", "*layerdrop*", "*_pdrop", "architectures", "auto_map", "chunk_size_feed_forward", "custom_pipelines",
    "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_*", "init_std", "init_xavier_std",
    "keys_to_ignore_at_inference", "label2id", "language", "license", "model_type", "name", "num_labels",
    "output_attentions", "output_hidden_states", "output_past", "output_scores", "prefix", "pretraining_tp",
    "problem_type", "return_dict", "return_dict_in_generate", "summary_*", "task_specific_params", "tf_legacy_loss",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "transformers.js_config", "use_bfloat16",
    "use_cache", "use_return_dict", "xla_device", "eos_token_ids", "max_sequence_length", "is_matryoshka",
    "matryoshka_dimensions",
)  # fmt: skip
# Keys that code of transformers for all classes reads, also as second names of others, and the
# version whose code was searched. The families know all other keys that their classes read.
_READ_BY_ALL = (
    "attention_chunk_size", "cache_implementation", "head_dim", "hidden_size", "is_causal",
    "is_encoder_decoder", "kv_sharing_modes", "layer_types", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "per_layer_config", "quantization_config*", "rope_parameters",
    "rope_scaling", "sliding_window", "use_bidirectional_attention",
)  # fmt: skip
_DEFAULTS = {"use_bidirectional_attention": False}  # of those whose default is not null
_TRANSFORMERS = [5, 23]

FAMILIES_BY_KIND: Mapping[str, tuple[Family, ...]] = {
    "encoder": (*encoders.FAMILIES, *deberta.FAMILIES, *rotary_encoders.FAMILIES),
    "decoder": (*decoders.FAMILIES, *gemma.FAMILIES, *blocks.FAMILIES),
    "encoder-decoder": seq2seq.FAMILIES,
}
FAMILIES = tuple(family for families in FAMILIES_BY_KIND.values() for family in families)


def find_family(config: Config) -> Family:
    """Return the family of a checkpoint by `model_type` and `architectures` of config.json.

    Raises `ImportFailedError`, whose message lists the supported architectures.
    """
    model_type = config.text("model_type", "")
    if model_type == "xlm-roberta" and "lora_adaptations" in config:
        raise ImportFailedError(
            "config.json: lora_adaptations is not supported, because a request would choose one of the adapters; "
            "import jinaai/jina-embeddings-v3-hf, which has the same model without them"
        )
    named = config.get("architectures", None) or ()
    if model_type == "bert" and isinstance(named, list) and any(str(name).startswith("JinaBert") for name in named):
        model_type = "jina_bert"
    supported = {family.name: family for family in FAMILIES}
    if model_type not in supported:
        code = "it needs Python code of its repository (auto_map), which is never run; " if "auto_map" in config else ""
        if model_type in REASONS:
            code = f"{REASONS[model_type]}; "
        raise ImportFailedError(
            f"config.json: model_type {model_type!r} is not supported; {code}supported are "
            f"{', '.join(sorted(supported))}, and Firefox translation models"
        )
    family = supported[model_type]
    if not isinstance(named, list | tuple) or any(name not in family.architectures for name in named):
        raise ImportFailedError(
            f"config.json: architectures {named!r} of model_type {model_type!r} is not supported; supported are "
            f"{', '.join(family.architectures)}"
        )
    return family


def describe(
    family: Family,
    config: Config,
    tensors: Tensors,
    tokenizer: Tokenizer | None = None,
    input_names: Sequence[str] | None = None,
    max_tokens: int | None = None,
    *,
    is_embedding: bool = False,
    answers: tuple[int, int | None] | None = None,
) -> tuple[Description, Weights]:
    """Describe a checkpoint, and mark the tensors that do not change its outputs as known.

    Args:
        tensors: the weights, whose shapes are compared with the description.
        tokenizer: decides the token types of text pairs, and is only needed for
            models with token types.
        input_names: `model_input_names` of tokenizer_config.json, None if it has none.
        max_tokens: other limit of positions than the checkpoint's, see `_positions`.
        is_embedding: the folder is one of sentence-transformers. Its decoder-only model computes
            embeddings and generates no text, whatever class saved it.
        answers: token ids of yes and no, if a decoder-only model is a reranker.
    """
    if is_embedding and family.base:
        config.override("architectures", [family.base])
    model = describe_configuration(family, config, tensors)
    if answers is not None:
        model = as_reranker(model, answers)
    tensors.ignore(*family.ignored)
    stack = model.encoder
    if stack is not None and stack.embedding.types > 1:
        try:
            separator = type_separator(tokenizer, input_names)
        except PairsUnsupportedError:
            if model.head is not None and model.head.label_kind == "span":  # every call has a pair
                raise
            model, separator = replace(model, reads_pairs=False), None
        stack = replace(stack, embedding=replace(stack.embedding, type_separator=separator))
    limited = replace(model, encoder=stack, max_positions=_positions(model, max_tokens))
    modules = family.modules(limited, tensors)
    weights = Weights(tensors, {**modules, **prediction_modules(limited, modules, tensors)})
    check_shapes(model, weights)
    _check_tables(limited)
    return limited, weights


def describe_configuration(family: Family, config: Config, tensors: Tensors) -> Description:
    """Describe a configuration. The shapes of the tensors are not checked."""
    config.ignore(*_HARMLESS, *GENERATION_KEYS)
    if config.get("quantization_config", None) is not None:
        raise ImportFailedError(
            "config.json: the weights are quantized (quantization_config), which is not supported; import the "
            "repository with the original weights, and choose --bits 8 or 4 to quantize them"
        )
    try:
        return with_predictions(family.describe(config, tensors), config, tensors)
    except ImportFailedError:
        raise
    except ValueError as error:
        raise ImportFailedError(f"config.json: {error}") from None


def pass_over_unread(config: Config, ignored: Sequence[str] = ()) -> list[str]:
    """Ignore the keys of config.json that the class of the model in transformers does not read.

    It may read any key if the repository has code of its own, or was saved by a later version. All
    known keys must have been read before. Keys of `ignored` are ignored in any case; one that does
    not exist, or is known, raises `UsageError`. Returns a note, if there are ignored keys.
    """
    unread = config.unread()
    for name in ignored:
        if name not in unread:
            others = f"; its unknown keys are {first_of(unread)}" if unread else ""
            raise UsageError(f"--ignore-key {name}: config.json has no unknown key of this name{others}")
    version = [int(part) for part in re.findall(r"\d+", str(config.get("transformers_version", "")))[:2]]
    reads_any = "auto_map" in config or version > _TRANSFORMERS
    passed = [name for name, value in unread.items() if not (reads_any or _may_be_read(name, value))]
    defaults = (name for name, value in unread.items() if value in (None, _DEFAULTS.get(name)))
    config.ignore(*map(glob.escape, (*defaults, *passed, *ignored)))
    stated = {name: unread[name] for name in (*passed, *ignored) if unread[name] is not None}
    return [f"config.json has keys that do not change the model and are ignored: {first_of(stated)}"] if stated else []


def _may_be_read(name: str, value: object) -> bool:
    """Return True if a key may change the model; a nested one of rope belongs to another type."""
    is_option = name.startswith("rope_") and "." in name
    return isinstance(value, dict) if is_option else any(fnmatch.fnmatch(name, key) for key in _READ_BY_ALL)


def rotary_limits(model: Description) -> list[int]:
    """Return the lengths of texts from which on transformers computes other rotary frequencies."""
    layers = [layer for stack in (model.encoder, model.decoder) if stack for layer in stack.attention]
    return [layer.rotary.max_positions for layer in layers if layer.rotary and layer.rotary.max_positions is not None]


def _check_tables(model: Description) -> None:
    """Check the size of tables with a row for each position, which no stored tensor limits."""
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        columns = max(0 if layer.rotary is None else layer.head_size // 2 for layer in stack.attention)
        if stack.embedding.has_positions:
            columns = stack.width
        if stack.relative_bias is not None:
            columns = max(columns, 2 * stack.attention[0].heads)
        if columns * model.max_positions > MAX_TABLE:
            raise ImportFailedError(
                f"config.json gives the model {model.max_positions:,} positions, whose tables would have "
                f"{columns * model.max_positions:,} numbers; at most {MAX_TABLE:,} are supported: import fewer "
                "positions with --max-tokens"
            )


def _positions(model: Description, max_tokens: int | None) -> int:
    """Return the number of positions of a model with the limit that the user chose.

    A limit that is larger than the tables of any graph should be is refused.
    """
    positions = max_tokens or model.max_positions
    if model.has_position_limit:
        positions = min(positions, model.max_positions, *rotary_limits(model))
    elif max_tokens is not None and max_tokens > MAX_POSITIONS:
        raise ImportFailedError(f"--max-tokens must be at most {MAX_POSITIONS:,}, got {max_tokens:,}")
    if not 1 <= positions <= MAX_POSITIONS:
        raise ImportFailedError(
            f"config.json gives the model {model.max_positions:,} positions; supported are 1 to {MAX_POSITIONS:,}: "
            "correct config.json, or import fewer positions with --max-tokens"
        )
    return positions
