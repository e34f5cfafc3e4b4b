"""Families of encoder-decoders: Marian, BART, mBART, M2M100 with NLLB, Pegasus, T5 and mT5.

T5 and mT5 have a class for the encoder alone, too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from sightline.base.bundle import TrainingUnit
from sightline.export.families import Family
from sightline.export.families.decoders import check_output
from sightline.export.families.description import (
    Attention,
    Description,
    FeedForward,
    Head,
    Norm,
    Reader,
    RelativeBias,
    Stack,
    TokenEmbedding,
)
from sightline.export.families.encoders import label_kind, label_names
from sightline.export.families.values import activation, count, equal_heads, timescale_sinusoids
from sightline.export.families.weights import BART_LAYER, AdaptedModule, Array, Source, layer_modules
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Tensors

# Keys without an effect on the graphs: sizes under a second name, settings of the training, and
# settings of classes with labels.
_IGNORED_KEYS = (
    "num_hidden_layers", "classif*", "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "pruned_heads",
    "share_encoder_decoder_embeddings", "extra_pos_embeddings", "replacing_rate", "save_step", "student_*",
    "num_beam_hyps_to_keep", "total_flos", "max_source_length", "max_target_length",
)  # fmt: skip

_M2M100_PAD = 1
_BART_END = 2  # default of the end token, which is the start token of the decoder, too


@dataclass(frozen=True)
class _Variant:
    """Differences between the families whose layers have the structure of BART."""

    family: str
    norm_place: Literal["pre", "post"]
    positions: Literal["learned", "halves", "fairseq"]
    has_embedding_norm: bool = False
    activation: str = "gelu"
    scale_embedding: bool = False


def _describe(variant: _Variant, config: Config, tensors: Tensors) -> Description:
    config.ignore(*_IGNORED_KEYS)
    config.neutral("is_encoder_decoder", True)
    config.neutral("normalize_before", variant.norm_place == "pre")
    config.neutral("normalize_embedding", variant.has_embedding_norm)
    config.neutral("add_final_layer_norm", variant.norm_place == "pre")
    config.neutral("static_position_embeddings", variant.positions != "learned")
    config.neutral("add_bias_logits", False)
    check_output(config, tensors, "model.shared.weight", default=True)
    if variant.positions == "fairseq":
        config.neutral("pad_token_id", _M2M100_PAD)
    width = config.integer("d_model", least=4)
    scale = math.sqrt(width) if config.boolean("scale_embedding", variant.scale_embedding) else 1.0
    function = activation(config.text("activation_function", variant.activation))

    def stack(name: str) -> Stack:
        attention = equal_heads(config, f"{name}_attention_heads", width)
        return Stack(
            width,
            Norm("layer", 1e-5),
            variant.norm_place,
            (attention,) * count(config, f"{name}_layers"),
            FeedForward(function, config.integer(f"{name}_ffn_dim")),
            TokenEmbedding(
                scale,
                has_positions=True,
                padding=_M2M100_PAD if variant.positions == "fairseq" and name == "encoder" else None,
                has_norm=variant.has_embedding_norm,
            ),
            cross=attention if name == "decoder" else None,
            has_final_norm=variant.norm_place == "pre",
        )

    source = vocabulary = config.integer("vocab_size")
    model = Description(variant.family, vocabulary, config.integer("max_position_embeddings"), stack("encoder"))
    if next(iter(config.get("architectures", None) or ()), "").endswith("ForSequenceClassification"):
        start, end = (
            config.integer(f"{key}_token_id", default, least=0, most=vocabulary - 1)
            for key, default in (("decoder_start", _BART_END), ("eos", _BART_END))
        )
        labels = label_names(config)
        head = Head("end", label_kind(config, len(labels)), "tanh")
        return replace(model, head=head, reader=Reader(stack("decoder"), start, end), labels=labels)
    if variant.family == "marian":
        vocabulary = config.integer("decoder_vocab_size", source)
        if not config.boolean("share_encoder_decoder_embeddings", True) and "model.shared.weight" in tensors.names:
            raise ImportFailedError(
                "the checkpoint has a tensor 'model.shared.weight', but share_encoder_decoder_embeddings in "
                "config.json is false; correct the one that is wrong"
            )
    source_vocabulary = None if source == vocabulary else source
    return replace(model, vocabulary=vocabulary, source_vocabulary=source_vocabulary, decoder=stack("decoder"))


def _modules(variant: _Variant, model: Description, tensors: Tensors) -> Mapping[str, Source]:
    start = "model." if "model.encoder.layers.0.fc1.weight" in tensors else ""
    is_tied = variant.family != "marian" or f"{start}shared.weight" in tensors  # else each language has its own table
    modules = _embeddings(start, tensors, has_output=model.decoder is not None and is_tied)
    modules |= {"head.dense": "classification_head.dense", "head.output": "classification_head.out_proj"}
    if variant.family != "m2m_100":
        modules["output.bias"] = AdaptedModule("final_logits_bias", is_row=True)
    for stack in ("encoder", "decoder"):
        layer, name = f"{stack}.{{}}", f"{start}{stack}.layers.{{}}"
        modules[f"{stack}.embedding_norm"] = f"{start}{stack}.layernorm_embedding"
        modules[f"{stack}.norm"] = f"{start}{stack}.layer_norm"
        modules[f"{stack}.positions"] = _positions(variant, model, f"{start}{stack}.embed_positions", tensors)
        if stack == "encoder" and variant.positions == "fairseq":
            modules[f"{stack}.positions"] = partial(_padded_sinusoids, model)
        modules |= layer_modules(name, BART_LAYER, stack)
        modules[f"{layer}.cross_attention_norm"] = f"{name}.encoder_attn_layer_norm"
        for part, projection in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out")):
            modules[f"{layer}.cross_attention.{part}"] = f"{name}.encoder_attn.{projection}_proj"
    return modules


def _embeddings(start: str, tensors: Tensors, *, has_output: bool) -> dict[str, Source]:
    """Return the modules of the embeddings and of the output projection.

    The tensors of the checkpoint decide which tables are shared, as in transformers 5: a table that
    is stored is used even if it differs from the others, and `shared` takes the place of a missing
    one. Without `shared`, the stored tables must be equal. The bundle stores equal tables once.

    With `has_output`, a missing projection is tied to `shared`; otherwise to the table of the
    decoder, or there is none.
    """
    shared, tables = f"{start}shared", [f"{start}{stack}.embed_tokens" for stack in ("encoder", "decoder")]
    stored = [name for name in (*tables, "lm_head") if f"{name}.weight" in tensors]
    common = shared if f"{shared}.weight" in tensors else next(iter(stored), shared)
    if common != shared and not {*tables, *["lm_head"] * has_output} <= set(stored):
        for other in stored[1:]:
            reason = (
                f"and {shared!r} is missing, so that it is not known which of them it was; use a complete checkpoint"
            )
            tensors.check_equal(f"{common}.weight", f"{other}.weight", reason)
    encoder, decoder = (table if table in stored else common for table in tables)
    modules: dict[str, Source] = {"encoder.embedding": encoder, "decoder.embedding": decoder}
    if encoder == decoder:
        modules = {"embedding": encoder}
    if "lm_head" in stored:
        modules["output.weight"] = "lm_head.weight"
    elif has_output and common != decoder:
        modules["output.weight"] = f"{common}.weight"
    return modules


def _positions(variant: _Variant, model: Description, name: str, tensors: Tensors) -> Source:
    width = model.encoder_stack.width
    if variant.positions == "learned":
        return AdaptedModule(name, skip=2)  # the first two rows are never used
    if variant.positions == "fairseq":
        # The first position is the one after the padding token.
        return partial(timescale_sinusoids, model.max_positions, width, _M2M100_PAD + 1)
    # Transformers does not save this table, but reads it.
    return name if f"{name}.weight" in tensors else partial(_sinusoid_halves, model.max_positions, width)


def _padded_sinusoids(model: Description) -> Array:
    """Return the positions of an encoder whose padding token has a row of zeros."""
    table = timescale_sinusoids(model.max_positions, model.encoder_stack.width, _M2M100_PAD + 1)
    return np.concatenate([np.zeros_like(table[:1]), table])


def _sinusoid_halves(positions: int, width: int) -> Array:
    """Return sinusoids (P, M) with sines in the first half of a row and cosines in the second."""
    angles = np.arange(positions)[:, None] / np.power(10000, 2 * np.arange((width + 1) // 2) / width)  # float64
    return np.concatenate([np.sin(angles), np.cos(angles[:, : width // 2])], axis=1).astype(np.float32)


def _t5(family: str, default_feed_forward: str, config: Config, tensors: Tensors) -> Description:
    config.ignore(*_IGNORED_KEYS, "is_gated_act", "dense_act_fn", "output_past")
    # Encoders of sentence-transformers, such as GTR and Sentence-T5, have no decoder.
    has_decoder = not next(iter(config.get("architectures", None) or ()), "").endswith("EncoderModel")
    config.neutral("is_encoder_decoder", True, has_decoder)
    width, layers = config.integer("d_model", least=1), count(config, "num_layers")
    # A bucket of the smaller half of one direction has one distance.
    num_buckets = config.integer("relative_attention_num_buckets", 32, least=4)
    max_distance = config.integer("relative_attention_max_distance", 128, least=num_buckets // 2 + 1)
    kind, _, gated = config.text("feed_forward_proj", default_feed_forward).rpartition("-")
    if kind not in ("", "gated"):
        raise ValueError(f"feed_forward_proj must be 'gated-NAME' or the name of an activation, got {kind}-{gated}")
    # "gated-gelu" has always been the approximation with tanh.
    function = activation("gelu_new" if (kind, gated) == ("gated", "gelu") else gated)
    feed_forward = FeedForward(function, config.integer("d_ff"), gated=bool(kind), has_bias=False)
    heads, head_size = count(config, "num_heads"), config.integer("d_kv")
    attention = Attention(heads, heads, head_size, scale=1.0, has_bias=False, has_output_bias=False)

    def stack(name: str, layers: int) -> Stack:
        return Stack(
            width,
            Norm("rms", config.number("layer_norm_epsilon", 1e-6, above=0)),
            "pre",
            (attention,) * layers,
            feed_forward,
            TokenEmbedding(),
            cross=attention if name == "decoder" else None,
            relative_bias=RelativeBias(num_buckets, max_distance, bidirectional=name == "encoder"),
            has_final_norm=True,
        )

    is_scaled = False
    if family == "t5":
        # The first models scale the hidden states before the projection. Their configurations have
        # `tie_word_embeddings` or nothing; later versions of Transformers write another key.
        is_scaled = config.boolean("scale_decoder_outputs", config.boolean("tie_word_embeddings", True))
    else:
        config.ignore("scale_decoder_outputs", "tie_word_embeddings")
    decoder = stack("decoder", count(config, "num_decoder_layers", layers))
    return Description(
        family,
        config.integer("vocab_size"),
        config.integer("n_positions", 512),  # not a limit of the architecture, but of the training
        stack("encoder", layers),
        decoder if has_decoder else None,
        logits_scale=width**-0.5 if is_scaled else 1.0,
    )


def _t5_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    modules = _embeddings("", tensors, has_output=model.decoder is not None)
    is_gated = model.encoder_stack.feed_forward.gated
    for stack in ("encoder", "decoder"):
        layer, name = f"{stack}.{{}}", f"{stack}.block.{{}}.layer"
        last = 1 if stack == "encoder" else 2
        modules[f"{stack}.relative_bias"] = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        modules[f"{stack}.norm"] = f"{stack}.final_layer_norm"
        modules[f"{layer}.feed_forward_norm"] = f"{name}.{last}.layer_norm"
        feed_forward = f"{name}.{last}.DenseReluDense"
        modules[f"{layer}.feed_forward.outer"] = f"{feed_forward}.wo"
        modules[f"{layer}.feed_forward.inner"] = f"{feed_forward}.wi_1" if is_gated else f"{feed_forward}.wi"
        modules[f"{layer}.feed_forward.gate"] = f"{feed_forward}.wi_0"
        for number, ours, theirs in ((0, "self_attention", "SelfAttention"), (1, "cross_attention", "EncDecAttention")):
            modules[f"{layer}.{ours}_norm"] = f"{name}.{number}.layer_norm"
            for part, projection in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
                modules[f"{layer}.{ours}.{part}"] = f"{name}.{number}.{theirs}.{projection}"
    return modules


# A table that the tables of encoder and decoder repeat, and version numbers of fairseq.
_REPEATED = ("model.shared.weight", "shared.weight", "*encoder.version", "*decoder.version")


def _family(
    variant: _Variant, *architectures: str, ignored: tuple[str, ...] = (), training_unit: TrainingUnit = "text"
) -> Family:
    describe: Callable[[Config, Tensors], Description] = partial(_describe, variant)
    modules = partial(_modules, variant)
    return Family(variant.family, architectures, describe, modules, (*_REPEATED, *ignored), training_unit)


# Translation models are trained on pairs of sentences: Marian on OPUS, M2M-100 and NLLB on mined
# pairs, and mBART, whose pretraining reads whole passages, in its fine-tuning. BART, Pegasus and T5
# are trained on passages of several sentences.
MARIAN = _family(_Variant("marian", "post", "halves"), "MarianMTModel", training_unit="sentence")
BART = _family(
    _Variant("bart", "post", "learned", has_embedding_norm=True),
    "BartForConditionalGeneration",
    "BartModel",
    "BartForSequenceClassification",
)
MBART = _family(
    _Variant("mbart", "pre", "learned", has_embedding_norm=True),
    "MBartForConditionalGeneration",
    training_unit="sentence",
)
M2M100 = _family(
    _Variant("m2m_100", "pre", "fairseq", activation="relu", scale_embedding=True),
    "M2M100ForConditionalGeneration",
    ignored=("*embed_positions.weights", "*embed_positions._float_tensor"),
    training_unit="sentence",
)
PEGASUS = _family(_Variant("pegasus", "pre", "halves"), "PegasusForConditionalGeneration")
# Early checkpoints have a bias of cross-attention that no version has ever used.
_T5_IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", *_REPEATED)
T5 = Family(
    "t5",
    ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5EncoderModel"),
    partial(_t5, "t5", "relu"),
    _t5_modules,
    _T5_IGNORED,
)
MT5 = Family(
    "mt5",
    ("MT5ForConditionalGeneration", "MT5EncoderModel"),
    partial(_t5, "mt5", "gated-gelu"),
    _t5_modules,
    _T5_IGNORED,
)
FAMILIES = (MARIAN, BART, MBART, M2M100, PEGASUS, T5, MT5)
