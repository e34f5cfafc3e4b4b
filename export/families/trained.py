"""Families of the models that `model` trains.

Their checkpoints are training runs, with the tensors of `state_dict`. PyTorch is not needed.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from sightline.export.families import Family
from sightline.export.families.description import (
    Attention,
    Description,
    FeedForward,
    Guided,
    Head,
    Norm,
    ProjectedKeys,
    RelativeKeys,
    Rotary,
    Stack,
    TokenEmbedding,
)
from sightline.export.families.shapes import check_shapes
from sightline.export.families.values import sinusoids
from sightline.export.families.weights import Array, Source, Weights
from sightline.export.sources.opened_checkpoint import Config, Tensors
from sightline.model.config import (
    MAX_DISTANCE,
    ROTARY_BASE,
    SPECIAL_IDS,
    ArchitectureConfig,
    alibi_slopes,
    architecture_of,
    guided_layer,
    matrix_indices,
)
from sightline.model.parts import CONFIG

NORM = Norm("layer", 1e-5)  # epsilon of `torch.nn.LayerNorm`
PROJECTIONS = "projections.matrices"  # (matrices, k, P) of a Linformer
# Keys that only change the training, and keys that the tensors or the manifest have too.
HARMLESS_KEYS = ("architecture", "dropout", "word_dropout", *SPECIAL_IDS)


def describe(config: ArchitectureConfig, tensors: Tensors) -> tuple[Description, Weights]:
    """Return the description and the named weights of a trained model."""
    family = FAMILIES[architecture_of(config)]
    keys = Config({"architecture": family.name, **asdict(config)}, CONFIG)
    model = family.describe(keys, tensors)
    keys.check_all_read()
    weights = Weights(tensors, family.modules(model, tensors))
    check_shapes(model, weights, CONFIG)
    return model, weights


def _transformer(config: Config, tensors: Tensors) -> Description:
    pre_norm, kind, heads = config.boolean("pre_norm"), config.text("encoder_attention"), config.integer("num_heads")
    own = _attention(config, 1 if kind.startswith("single-head") else heads)
    own = replace(own, has_projections=kind != "single-head-without-weights")
    encoder = (own,) * config.integer("encoder_layers")
    size, sharing = config.integer("linformer_size"), config.text("linformer_sharing")
    if kind == "linformer":
        indices = [matrix_indices(sharing, layer) for layer in range(len(encoder))]
        encoder = tuple(replace(own, projected_keys=ProjectedKeys(size, *pair)) for pair in indices)
    cross = _attention(config, heads, has_positions=False)
    decoder = (_attention(config, heads),) * config.integer("decoder_layers")
    source = replace(_stack(config, encoder, pre_norm), is_causal=config.boolean("causal_encoder"))
    target = _stack(config, decoder, pre_norm, cross)
    if config.text("decoder") == "ssru":
        target = replace(target, cell="ssru")
    # The weights of the step that reads a token are trained (Chen et al. 2020, section 3.2).
    guided: Guided | None = ("reads", guided_layer(len(decoder)), 0) if config.boolean("guided_alignment") else None
    return replace(_describe(config, source, target), guided_alignment=guided)


def _classifier(config: Config, tensors: Tensors) -> Description:
    head = Head("mean", "independent" if config.boolean("multi_label") else "classes")
    return replace(_encoder(config, tensors), head=head, labels=tuple(config.get("labels")))


def _tagger(config: Config, tensors: Tensors) -> Description:
    config.ignore("multi_label")
    return replace(_encoder(config, tensors), head=Head("tokens", "tokens"), labels=tuple(config.get("labels")))


def _encoder(config: Config, tensors: Tensors) -> Description:
    attention = (_attention(config, config.integer("num_heads")),) * config.integer("encoder_layers")
    return _describe(config, encoder=_stack(config, attention, pre_norm=False))


def _causal(config: Config, tensors: Tensors) -> Description:
    attention = (_attention(config, config.integer("num_heads")),) * config.integer("layers")
    return _describe(config, decoder=_stack(config, attention, pre_norm=True))


def _attention(config: Config, heads: int, has_positions: bool = True) -> Attention:
    size = config.integer("d_model") // heads
    attention = Attention(heads, heads, size, scale=size**-0.5 if config.boolean("scaled") else 1.0)
    positions = config.text("positions") if has_positions else ""
    if positions == "rotary":
        frequencies = ROTARY_BASE ** (-np.arange(0, size, 2) / size)
        return replace(attention, rotary=Rotary(tuple(frequencies.tolist())))
    return replace(attention, relative_keys=RelativeKeys(MAX_DISTANCE)) if positions == "relative" else attention


def _stack(config: Config, attention: tuple[Attention, ...], pre_norm: bool, cross: Attention | None = None) -> Stack:
    width = config.integer("d_model")
    positions = config.text("positions")
    return Stack(
        width,
        NORM,
        "pre" if pre_norm else "post",
        attention,
        FeedForward("relu", config.integer("d_ff")),
        TokenEmbedding(scale=width**0.5, has_positions=positions in ("sinusoidal", "learned")),
        cross,
        slopes=alibi_slopes(attention[0].heads) if positions == "alibi" else None,
        has_final_norm=pre_norm,
        has_residual=config.boolean("residual"),
    )


def _describe(config: Config, encoder: Stack | None = None, decoder: Stack | None = None) -> Description:
    config.ignore(*HARMLESS_KEYS)
    architecture, vocabulary = config.text("architecture"), config.integer("vocab_size")
    return Description(architecture, vocabulary, config.integer("max_positions"), encoder, decoder)


def _modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    modules: dict[str, Source] = {"embedding": "embedding", "head.output": "output"}
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is not None:
            modules |= _stack_modules(name, stack, model, tensors)
    if PROJECTIONS in tensors:
        for number in range(tensors.shape(PROJECTIONS)[0]):
            modules[f"encoder.projection.{number}"] = partial(_projection, tensors, number)
    return modules


def _stack_modules(name: str, stack: Stack, model: Description, tensors: Tensors) -> dict[str, Source]:
    layers, norm = ("layers", "norm") if model.is_decoder_only else (name, f"{name}_norm")
    modules: dict[str, Source] = {
        f"{name}.norm": norm,
        f"{name}.positions": partial(sinusoids, model.max_positions, stack.width),
        f"{name}.{{}}.self_attention.relative_keys": f"{layers}.{{}}.self_attention.positions.vectors",
    }
    if "position_embedding.weight" in tensors:
        modules[f"{name}.positions"] = "position_embedding"
    parts = {"self_attention": ("query", "key", "value", "output"), "feed_forward": ("inner", "outer")}
    parts["cell"] = ("forget", "input")
    parts["cross_attention"] = parts["self_attention"]
    for part, linears in parts.items():
        modules[f"{name}.{{}}.{part}_norm"] = f"{layers}.{{}}.{part}_norm.norm"
        modules |= {f"{name}.{{}}.{part}.{linear}": f"{layers}.{{}}.{part}.{linear}" for linear in linears}
    return modules


def _projection(tensors: Tensors, number: int) -> Array:
    matrix: Array = tensors.read(PROJECTIONS)[number]
    return matrix


FAMILIES = {
    family.name: family
    for family in (
        Family("transformer", ("Transformer",), _transformer, _modules),
        Family("classifier", ("Classifier",), _classifier, _modules),
        Family("tagger", ("Tagger",), _tagger, _modules),
        Family("encoder", ("TextEncoder",), _encoder, _modules),
        Family("causal", ("CausalModel",), _causal, _modules),
    )
}
