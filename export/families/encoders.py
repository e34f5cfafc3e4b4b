"""Families of encoders: BERT and its relatives.

All are post-norm (Devlin et al. 2019) except ModernBERT (Warner et al. 2024). In names of modules,
`{}` is the number of a layer.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from sightline.base.bundle import is_entailment
from sightline.export.families import Family
from sightline.export.families.description import (
    Activation,
    Description,
    FeedForward,
    Head,
    Norm,
    RelativeBias,
    Rotary,
    Stack,
    TokenEmbedding,
)
from sightline.export.families.values import MAX_WINDOW, activation, check_rotary_head, count, equal_heads, local_layers
from sightline.export.families.weights import QUERY_KEY_VALUE, AdaptedModule, Source, equal_parts, layer_modules
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Tensors
from sightline.model.config import alibi_slopes

# Keys of heads of pre-training and of sentence-transformers.
_HARMLESS = ("directionality", "pooler_*", "sbert_ce_default_activation_function", "sentence_transformers", "tie_*")
DEFAULT_LABELS = 2  # number of labels of a configuration without id2label


def check_common(config: Config, positions: str = "absolute") -> None:
    """Check the keys that all encoders share; `positions` is the kind of their positions."""
    config.ignore(*_HARMLESS)
    for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder", "is_causal"):
        config.neutral(key, False, None)
    config.neutral("cross_attention_hidden_size", None)
    config.neutral("pruned_heads", {}, None)
    config.neutral("position_embedding_type", positions, *([None] if positions == "absolute" else []))


def prefix_of(tensors: Tensors, *prefixes: str, embedding: str = "embeddings.word_embeddings") -> str:
    """Return the start of all names of the encoder: classes with a head add one of the prefixes."""
    return next((prefix for prefix in prefixes if f"{prefix}{embedding}.weight" in tensors), "")


def classes_of(start: str, *others: str) -> tuple[str, ...]:
    """Return the supported classes of a family: the encoder, and others that contain it."""
    supported = (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        *others,
    )
    return tuple(f"{start}{end}" for end in supported)


# Heads


@dataclass(frozen=True)
class HeadModules:
    """Modules of the heads of a family."""

    dense: str  # between the hidden state of the first token and the scores of a text
    activation: Activation  # after it
    output: str  # scores of a text
    norm: str = ""  # normalization after the activation
    before_tokens: bool = False  # scores of tokens, too, have the dense layer


def add_head(
    model: Description, config: Config, modules: HeadModules, pooling: Literal["first", "mean"] = "first"
) -> Description:
    """Add the head of the class that saved the checkpoint, if that class has one."""
    architecture = next(iter(config.get("architectures", None) or ()), "")
    if architecture.endswith(("ForTokenClassification", "ForQuestionAnswering")):
        is_span = architecture.endswith("ForQuestionAnswering")
        labels = ("start", "end") if is_span else label_names(config)
        dense = modules.activation if modules.before_tokens else None
        kind: Literal["tokens", "span"] = "span" if is_span else "tokens"
        head = Head("tokens", kind, dense, has_norm=modules.before_tokens and bool(modules.norm))
    elif architecture.endswith("ForSequenceClassification"):
        labels = label_names(config)
        head = Head(pooling, label_kind(config, len(labels)), modules.activation, has_norm=bool(modules.norm))
    else:
        return model
    return replace(model, head=head, labels=labels)


def label_names(config: Config) -> tuple[str, ...]:
    """Return the names of labels in the order of their scores."""
    names = config.get("id2label", None)
    if names is None:
        labels = tuple(f"LABEL_{index}" for index in range(count(config, "num_labels", DEFAULT_LABELS)))
    else:
        try:
            by_index = {int(index): str(name) for index, name in names.items()}
            labels = tuple(by_index[index] for index in range(len(by_index)))
        except (AttributeError, KeyError, ValueError):
            raise ImportFailedError(
                'config.json: id2label must map the numbers from 0 to names, such as {"0": "no", "1": "yes"}'
            ) from None
    if len(set(labels)) != len(labels):
        raise ImportFailedError("config.json: id2label has two labels of the same name; each needs its own")
    # Transformers takes the number of the label of entailment from label2id.
    numbers = config.get("label2id", None)
    if any(map(is_entailment, labels)) and numbers not in (None, {name: index for index, name in enumerate(labels)}):
        raise ImportFailedError("config.json: label2id differs from id2label; correct the one that is wrong")
    return labels


def label_kind(config: Config, num_labels: int) -> Literal["classes", "independent", "score"]:
    """Return the kind of the labels of a text; a model that predicts several numbers is refused."""
    problem = config.get("problem_type", None)
    if num_labels == 1:  # as cross-encoders of sentence-transformers
        return "score"
    if problem == "multi_label_classification":
        return "independent"
    if problem not in (None, "single_label_classification"):
        raise ImportFailedError(
            f"config.json: problem_type is {problem!r} with {num_labels} labels, which is not supported; supported "
            "are single_label_classification, multi_label_classification, and any problem with one label"
        )
    return "classes"


def head_modules(model: Description, modules: HeadModules) -> dict[str, Source]:
    """Return the modules of the head of a model."""
    if model.head is None:
        return {}
    output = "classifier" if model.head.pooling == "tokens" else modules.output
    if model.head.label_kind == "span" and not modules.before_tokens:
        output = "qa_outputs"
    sources: dict[str, Source] = {"head.output": output}
    if model.head.activation is not None:
        sources["head.dense"] = modules.dense
    if model.head.has_norm:
        sources["head.norm"] = modules.norm
    return sources


# BERT, RoBERTa, XLM-R, ELECTRA, MPNet: the same keys of config.json

_BERT_HEAD = HeadModules("bert.pooler.dense", "tanh", "classifier")
_ROBERTA_HEAD = HeadModules("classifier.dense", "tanh", "classifier.out_proj")
_ELECTRA_HEAD = HeadModules("classifier.dense", "gelu", "classifier.out_proj")


def describe_encoder(
    config: Config,
    family: str,
    embedding: TokenEmbedding,
    default_activation: str = "gelu",
    positions: str = "absolute",
    epsilon: float = 1e-12,
    max_positions: int = 512,
) -> Description:
    """Describe a post-norm encoder with the configuration keys of BERT.

    `positions` is their kind. `epsilon` and `max_positions` apply where the configuration has none.
    """
    check_common(config, positions)
    width = config.integer("hidden_size")
    stack = Stack(
        width,
        Norm("layer", config.number("layer_norm_eps", epsilon, above=0)),
        "post",
        (equal_heads(config, "num_attention_heads", width),) * count(config, "num_hidden_layers"),
        FeedForward(activation(config.text("hidden_act", default_activation)), config.integer("intermediate_size")),
        embedding,
    )
    unused = embedding.skipped_positions + embedding.position_offset
    longest = config.integer("max_position_embeddings", max_positions) - unused
    return Description(family, config.integer("vocab_size"), longest, stack)


def embedding_modules(embeddings: str, skip: int = 0) -> dict[str, Source]:
    """Return the modules of embeddings with BERT's names.

    No token uses the first `skip` rows of the table of positions.
    """
    return {
        "embedding": f"{embeddings}.word_embeddings",
        "encoder.positions": AdaptedModule(f"{embeddings}.position_embeddings", skip=skip),
        "encoder.types": f"{embeddings}.token_type_embeddings",
        "encoder.embedding_norm": f"{embeddings}.LayerNorm",
    }


def with_old_names(modules: Mapping[str, Source], tensors: Tensors) -> Mapping[str, Source]:
    """Rename parameters of normalizations if the checkpoint has the names of TensorFlow.

    Old checkpoints such as bert-base-uncased have `LayerNorm.gamma` and `LayerNorm.beta`.
    """
    if not any(name.endswith("LayerNorm.gamma") for name in tensors.names):
        return modules
    renamed = dict(modules)
    for name, module in modules.items():
        if isinstance(module, str) and module.endswith("LayerNorm"):
            renamed[f"{name}.weight"], renamed[f"{name}.bias"] = f"{module}.gamma", f"{module}.beta"
    return renamed


def _bert(config: Config, tensors: Tensors) -> Description:
    embedding = TokenEmbedding(has_positions=True, types=config.integer("type_vocab_size", 2), has_norm=True)
    return add_head(describe_encoder(config, "bert", embedding), config, _BERT_HEAD)


def _bert_modules(start: str, head: HeadModules, model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix, skipped = prefix_of(tensors, start), model.encoder_stack.embedding.skipped_positions
    modules = embedding_modules(f"{prefix}embeddings", skipped) | layer_modules(f"{prefix}encoder.layer.{{}}")
    modules["encoder.embedding_projection"] = f"{prefix}embeddings_project"  # of ELECTRA
    return with_old_names(modules | head_modules(model, head), tensors)


def _roberta(family: str, config: Config, tensors: Tensors) -> Description:
    # The position of padding is the id of the padding token, and those of tokens follow it.
    padding, types = config.integer("pad_token_id", 1, least=0), config.integer("type_vocab_size", 2)
    embedding = TokenEmbedding(
        has_positions=True, skipped_positions=padding, padding=padding, types=types, has_norm=True
    )
    return add_head(describe_encoder(config, family, embedding), config, _ROBERTA_HEAD)


def _electra(config: Config, tensors: Tensors) -> Description:
    size, types = config.integer("embedding_size", 128), config.integer("type_vocab_size", 2)
    projected_from = None if size == config.integer("hidden_size") else size
    embedding = TokenEmbedding(has_positions=True, types=types, has_norm=True, projected_from=projected_from)
    return add_head(describe_encoder(config, "electra", embedding), config, _ELECTRA_HEAD)


# MPNet has a relative bias in all layers. The id of its padding token, after which positions start,
# and the parameters of the bias are constants in transformers.
_MPNET_PADDING = 1
_MPNET_BIAS = RelativeBias(buckets=32, max_distance=128, bidirectional=True)


def _mpnet(config: Config, tensors: Tensors) -> Description:
    embedding = TokenEmbedding(
        has_positions=True, skipped_positions=_MPNET_PADDING, padding=_MPNET_PADDING, has_norm=True
    )
    model = describe_encoder(config, "mpnet", embedding)
    config.neutral("relative_attention_num_buckets", _MPNET_BIAS.buckets)
    model = replace(model, encoder=replace(model.encoder_stack, relative_bias=_MPNET_BIAS))
    return add_head(model, config, _ROBERTA_HEAD)


def _mpnet_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "mpnet.")
    layer = f"{prefix}encoder.layer.{{}}"
    attention = " ".join(f"attention.{name}" for name in ("attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm"))
    modules = embedding_modules(f"{prefix}embeddings", _MPNET_PADDING)
    modules |= layer_modules(layer, f"{attention} intermediate.dense output.dense output.LayerNorm")
    modules["encoder.relative_bias"] = f"{prefix}encoder.relative_attention_bias"
    return modules | head_modules(model, _ROBERTA_HEAD)


# Jina embeddings v2 (Günther et al. 2023): BERT with ALiBi and gated layers. The Python code of the
# repositories is never run.


def _slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head (Press et al. 2022, section 3).

    Slopes of a power of two of heads are a geometric sequence that ends at 2 ** -8. Further heads
    have every second slope of twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: heads - power]


def _jina(config: Config, tensors: Tensors) -> Description:
    types = config.integer("type_vocab_size", 2)
    config.neutral("feed_forward_type", "geglu")
    config.ignore("emb_pooler", "attn_implementation", "model_max_length")
    model = describe_encoder(config, "jina_bert", TokenEmbedding(types=types, has_norm=True), positions="alibi")
    stack = with_gates(model.encoder_stack)
    return replace(model, encoder=replace(stack, slopes=_slopes(stack.attention[0].heads)))


def with_gates(stack: Stack) -> Stack:
    """Return an encoder with gated feed-forward layers, of which only the last part has a bias."""
    feed_forward = replace(stack.feed_forward, gated=True, has_bias=False, has_output_bias=True)
    return replace(stack, feed_forward=feed_forward)


def _jina_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "bert.")
    layer = f"{prefix}encoder.layer.{{}}"
    modules = embedding_modules(f"{prefix}embeddings") | layer_modules(layer)
    modules |= equal_parts("encoder.{}.feed_forward", ("gate", "inner"), f"{layer}.mlp.gated_layers")
    modules["encoder.{}.feed_forward.outer"] = f"{layer}.mlp.wo"
    modules["encoder.{}.feed_forward_norm"] = f"{layer}.mlp.layernorm"
    return modules


# DistilBERT

_DISTILBERT_HEAD = HeadModules("pre_classifier", "relu", "classifier")


def _distilbert(config: Config, tensors: Tensors) -> Description:
    check_common(config)
    config.ignore("sinusoidal_pos_embds")  # the table of positions is stored in both cases
    width, positions = config.integer("dim"), config.integer("max_position_embeddings", 512)
    stack = Stack(
        width,
        Norm("layer", 1e-12),  # not in the configuration
        "post",
        (equal_heads(config, "n_heads", width),) * count(config, "n_layers"),
        FeedForward(activation(config.text("activation", "gelu")), config.integer("hidden_dim")),
        TokenEmbedding(has_positions=True, has_norm=True),
    )
    model = Description("distilbert", config.integer("vocab_size"), positions, stack)
    return add_head(model, config, _DISTILBERT_HEAD)


def _distilbert_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "distilbert.")
    modules = layer_modules(
        f"{prefix}transformer.layer.{{}}",
        "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2 "
        "output_layer_norm",
    )
    return embedding_modules(f"{prefix}embeddings") | modules | head_modules(model, _DISTILBERT_HEAD)


# ALBERT: layers share their weights (Lan et al. 2020)

_ALBERT_HEAD = HeadModules("albert.pooler", "tanh", "classifier")


def _albert(config: Config, tensors: Tensors) -> Description:
    config.ignore("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    size, types = config.integer("embedding_size", 128), config.integer("type_vocab_size", 2)
    embedding = TokenEmbedding(has_positions=True, types=types, has_norm=True, projected_from=size)
    model = describe_encoder(config, "albert", embedding, default_activation="gelu_new")
    # Layers of a group share their weights, so that no shape shows the number of layers.
    groups, inner = count(config, "num_hidden_groups", 1), count(config, "inner_group_num", 1)
    counts = _albert_groups(tensors) if tensors.names else (groups, inner)
    for key, number, stored in (("num_hidden_groups", groups, counts[0]), ("inner_group_num", inner, counts[1])):
        if number != stored:
            raise ImportFailedError(f"config.json: {key} is {number}, but the checkpoint has {stored}")
    stack = model.encoder_stack
    stack = replace(stack, attention=stack.attention * inner)
    return add_head(replace(model, encoder=stack), config, _ALBERT_HEAD)


def _albert_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "albert.")
    modules = embedding_modules(f"{prefix}embeddings")
    modules["encoder.embedding_projection"] = f"{prefix}encoder.embedding_hidden_mapping_in"
    groups, inner = _albert_groups(tensors)
    layers = model.encoder_stack.layers
    repeated = layers // inner
    for number in range(layers):
        group = int(number // inner / (repeated / groups))  # as transformers rounds it
        layer = f"{prefix}encoder.albert_layer_groups.{group}.albert_layers.{number % inner}"
        attention = " ".join(f"attention.{name}" for name in (*QUERY_KEY_VALUE, "dense", "LayerNorm"))
        modules |= layer_modules(layer, f"{attention} ffn ffn_output full_layer_layer_norm", number=number)
    return modules | head_modules(model, _ALBERT_HEAD)


def _albert_groups(tensors: Tensors) -> tuple[int, int]:
    """Return the number of groups of layers, and the number of different layers in each."""
    prefix = prefix_of(tensors, "albert.", embedding="embeddings.position_embeddings")
    name = f"{prefix}encoder.albert_layer_groups.{{}}.albert_layers.{{}}.ffn.weight"
    groups = next(number for number in itertools.count() if name.format(number, 0) not in tensors)
    return groups, next(number for number in itertools.count() if name.format(0, number) not in tensors)


# ModernBERT

_MODERNBERT_HEAD = HeadModules("head.dense", "gelu", "classifier", norm="head.norm", before_tokens=True)
_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0


def _modernbert(config: Config, tensors: Tensors) -> Description:
    check_common(config)
    config.ignore(
        "decoder_bias", "deterministic_flash_attn", "layer_norm_eps", "reference_compile", "repad_logits_with_grad",
        "sparse_pred*",
    )  # fmt: skip
    width, num_layers = config.integer("hidden_size"), count(config, "num_hidden_layers")
    has_bias = config.boolean("attention_bias", False)
    attention = equal_heads(config, "num_attention_heads", width)
    attention = replace(attention, has_bias=has_bias, has_output_bias=has_bias)
    window = config.integer("local_attention", 128, least=1, most=MAX_WINDOW)
    every = config.integer("global_attn_every_n_layers", 3, least=1)
    is_local = local_layers(config, [number % every != 0 for number in range(num_layers)])
    rotary = {local: _rotary(config, local, attention.head_size) for local in (False, True)}
    layers = tuple(replace(attention, rotary=rotary[local], window=window if local else None) for local in is_local)
    stack = Stack(
        width,
        Norm("layer", config.number("norm_eps", 1e-5, above=0), has_bias=config.boolean("norm_bias", False)),
        "pre",
        layers,
        FeedForward(
            activation(config.text("hidden_activation", "gelu")),
            config.integer("intermediate_size"),
            gated=True,
            has_bias=config.boolean("mlp_bias", False),
        ),
        TokenEmbedding(has_norm=True),
        has_final_norm=True,
        skips_first_norm=True,
    )
    positions = config.integer("max_position_embeddings", 8192)
    model = Description("modernbert", config.integer("vocab_size"), positions, stack)
    pooling = config.get("classifier_pooling", "cls")
    model = add_head(model, config, _MODERNBERT_HEAD, "mean" if pooling == "mean" else "first")
    if model.head is None:
        config.ignore("classifier_activation", "classifier_bias")
        return model
    if pooling not in ("cls", "mean") and model.head.pooling != "tokens":
        raise ImportFailedError(f"config.json: classifier_pooling must be cls or mean, got {str(pooling)[:40]!r}")
    function = activation(config.text("classifier_activation", "gelu"))
    has_bias = config.boolean("classifier_bias", False)
    return replace(model, head=replace(model.head, activation=function, has_bias=has_bias))


def _rotary(config: Config, local: bool, head_size: int) -> Rotary:
    """Return the rotary embedding of local or of global layers."""
    check_rotary_head(head_size)
    config.neutral("rope_scaling", None)
    kind, key = ("sliding_attention", "local_rope_theta") if local else ("full_attention", "global_rope_theta")
    if config.get(key, theta := _LOCAL_THETA if local else _GLOBAL_THETA) is None:
        raise ImportFailedError(f"config.json: {key} must be a number, got null")
    theta = config.number(key, theta, above=1)
    options = config.section("rope_parameters")
    options = None if options is None else options.section(kind)
    if options is not None:
        options.neutral("rope_type", "default")
        theta = options.number("rope_theta", theta, above=1)
    return Rotary(tuple(theta ** (-2 * index / head_size) for index in range(head_size // 2)))


def _modernbert_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "model.", embedding="embeddings.tok_embeddings")
    layer = f"{prefix}layers.{{}}"
    modules = layer_modules(layer, "- - - attn.Wo attn_norm - mlp.Wo mlp_norm")
    modules |= {"embedding": f"{prefix}embeddings.tok_embeddings", "encoder.norm": f"{prefix}final_norm"}
    modules["encoder.embedding_norm"] = f"{prefix}embeddings.norm"
    modules |= equal_parts("encoder.{}.self_attention", QUERY_KEY_VALUE, f"{layer}.attn.Wqkv")
    modules |= equal_parts("encoder.{}.feed_forward", ("gate", "inner"), f"{layer}.mlp.Wi")
    return modules | head_modules(model, _MODERNBERT_HEAD)


# Patterns of tensors: numbers of positions, which old versions stored, and heads of pre-training.
_UNUSED = ("*embeddings.position_ids", "*embeddings.token_type_ids", "*pooler.*")

BERT = Family(
    "bert",
    classes_of("Bert", "ForPreTraining"),
    _bert,
    partial(_bert_modules, "bert.", _BERT_HEAD),
    (*_UNUSED, "cls.*"),
)
ROBERTA, XLM_ROBERTA, CAMEMBERT = (
    Family(
        name,
        classes_of(start),
        partial(_roberta, name),
        partial(_bert_modules, "roberta.", _ROBERTA_HEAD),
        (*_UNUSED, "lm_head.*"),
    )
    for name, start in (("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
)
ELECTRA = Family(
    "electra",
    classes_of("Electra", "ForPreTraining"),
    _electra,
    partial(_bert_modules, "electra.", _ELECTRA_HEAD),
    (*_UNUSED, "generator_*", "discriminator_predictions.*"),
)
MPNET = Family("mpnet", classes_of("MPNet"), _mpnet, _mpnet_modules, (*_UNUSED, "lm_head.*"))
# `model_type` is that of BERT.
JINA_BERT = Family("jina_bert", ("JinaBertModel", "JinaBertForMaskedLM"), _jina, _jina_modules, (*_UNUSED, "cls.*"))
DISTILBERT = Family("distilbert", classes_of("DistilBert"), _distilbert, _distilbert_modules, (*_UNUSED, "vocab_*"))
ALBERT = Family(
    "albert",
    classes_of("Albert", "ForPreTraining"),
    _albert,
    _albert_modules,
    (*_UNUSED, "predictions.*", "sop_classifier.*"),
)
MODERNBERT = Family("modernbert", classes_of("ModernBert"), _modernbert, _modernbert_modules, ("head.*", "decoder.*"))

FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, MPNET, DISTILBERT, ALBERT, MODERNBERT, JINA_BERT)
