"""DeBERTa of the second and third version (He et al. 2021, 2023), with disentangled attention."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sightline.export.families import Family
from sightline.export.families.description import Convolution, Description, Disentangled, TokenEmbedding
from sightline.export.families.encoders import (
    HeadModules,
    add_head,
    classes_of,
    describe_encoder,
    embedding_modules,
    head_modules,
    prefix_of,
    with_old_names,
)
from sightline.export.families.values import activation
from sightline.export.families.weights import Source, layer_modules
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Tensors

# A head above this size would be summed in parts whose number depends on the batch.
_MAX_HEAD_SIZE = 128
_MAX_KERNEL = 99  # positions of a convolution
_HEAD = HeadModules("pooler.dense", "gelu", "classifier")


def _deberta(config: Config, tensors: Tensors) -> Description:
    config.ignore("legacy", "pos_ebd_type")  # heads of pre-training; a name without an effect
    embedding = TokenEmbedding(
        has_positions=config.boolean("position_biased_input", True),
        types=config.integer("type_vocab_size", 0, least=0),
        has_norm=True,
    )
    model = describe_encoder(config, "deberta-v2", embedding, epsilon=1e-7)
    stack, kinds = model.encoder_stack, _kinds(config)
    attention = stack.attention[0]
    config.neutral("embedding_size", stack.width, None)
    config.neutral("attention_head_size", attention.head_size, None)
    # The scale is rounded like that of transformers.
    attention = replace(attention, scale=1 / float(np.sqrt(np.float32(attention.head_size * (1 + len(kinds))))))
    stack = replace(
        stack,
        attention=(attention,) * stack.layers,
        disentangled=_disentangled(config, kinds, model.max_positions),
        convolution=_convolution(config),
    )
    if stack.disentangled is not None and attention.head_size > _MAX_HEAD_SIZE:
        raise ImportFailedError(
            f"config.json: the size of a head must be at most {_MAX_HEAD_SIZE} for relative attention, got "
            f"{attention.head_size}"
        )
    model = add_head(replace(model, encoder=stack), config, _HEAD)
    if model.head is None or model.head.activation is None:
        return model
    config.neutral("pooler_hidden_size", stack.width, None)
    function = activation(config.text("pooler_hidden_act", "gelu"))
    return replace(model, head=replace(model.head, activation=function))


def _kinds(config: Config) -> set[str]:
    """Return the kinds of scores of relative positions: c2p, p2c, or both."""
    kinds = config.get("pos_att_type", None) or ()
    named = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(named, list | tuple) or not set(map(str, named)) <= {"c2p", "p2c"}:
        raise ImportFailedError(f"config.json: pos_att_type must have c2p, p2c or both, got {kinds!r}")
    return set(named)


def _disentangled(config: Config, kinds: set[str], positions: int) -> Disentangled | None:
    """Return the scores of relative positions, None if there are none."""
    if not config.boolean("relative_attention", False):
        config.ignore("position_buckets", "max_relative_positions", "norm_rel_ebd", "share_att_key")
        return None
    buckets = config.integer("position_buckets", -1, least=-1)
    reach = config.integer("max_relative_positions", -1, least=-1)
    parts = {part.strip() for part in config.text("norm_rel_ebd", "none").lower().split("|")}
    if not kinds:
        raise ImportFailedError(
            "config.json: relative_attention needs a pos_att_type of c2p, p2c or both, which is missing"
        )
    reach = positions if reach < 1 else reach
    is_exact = buckets < 1 or buckets // 2 >= positions - 1  # no distance is in a bucket with others
    if not is_exact and not 2 <= buckets // 2 < reach - 1:
        raise ImportFailedError(
            "config.json: position_buckets must be at least 4 and less than twice max_relative_positions, got "
            f"{buckets} and {reach}"
        )
    return Disentangled(
        buckets if buckets > 0 else reach,
        None if is_exact else reach,
        "c2p" in kinds,
        "p2c" in kinds,
        "layer_norm" in parts,
        config.boolean("share_att_key", False),
    )


def _convolution(config: Config) -> Convolution | None:
    """Return the convolution of DeBERTa-v2-xlarge, None if there is none."""
    size = config.integer("conv_kernel_size", 0, least=0, most=_MAX_KERNEL)
    if not size:
        config.ignore("conv_groups", "conv_act")
        return None
    config.neutral("conv_groups", 1, None)
    if size % 2 == 0:
        raise ImportFailedError(f"config.json: conv_kernel_size must be odd, got {size}")
    return Convolution(size, activation(config.text("conv_act", "tanh")))


def _deberta_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "deberta.")
    layer = f"{prefix}encoder.layer.{{}}"
    modules = embedding_modules(f"{prefix}embeddings") | layer_modules(layer)
    modules["encoder.relative"] = f"{prefix}encoder.rel_embeddings"
    modules["encoder.relative_norm"] = f"{prefix}encoder.LayerNorm"
    if model.encoder_stack.disentangled is None:
        tensors.ignore(f"{prefix}encoder.LayerNorm.*")  # it normalizes the table that is not there
    modules["encoder.convolution"] = f"{prefix}encoder.conv.conv"
    modules["encoder.convolution_norm"] = f"{prefix}encoder.conv.LayerNorm"
    disentangled = model.encoder_stack.disentangled
    is_shared = disentangled is not None and disentangled.is_shared
    for part in ("query", "key", "value"):
        name = f"{layer}.attention.self.{part}_proj"
        modules[f"encoder.{{}}.self_attention.{part}"] = name
        relative = name if is_shared else f"{layer}.attention.self.pos_{part}_proj"
        modules[f"encoder.{{}}.self_attention.relative_{part}"] = relative
    return with_old_names(modules | head_modules(model, _HEAD), tensors)


DEBERTA_V2 = Family(
    "deberta-v2",
    classes_of("DebertaV2"),
    _deberta,
    _deberta_modules,
    # Positions, and heads of pre-training.
    ("*embeddings.position_ids", "cls.*", "lm_predictions.*", "mask_predictions.*"),
)
FAMILIES = (DEBERTA_V2,)
