"""Heads that predict masked tokens, of models trained to (Devlin et al. 2019, section 3.1).

They score all tokens of the vocabulary at a position of the text: a dense layer, an activation, a
normalization, and the product with the table of embeddings.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sightline.export.families.description import Activation, Description, Predictions
from sightline.export.families.values import activation
from sightline.export.families.weights import Source
from sightline.export.sources.opened_checkpoint import Config, Tensors


@dataclass(frozen=True)
class _Modules:
    """Modules of the head of a family."""

    dense: str
    norm: str
    output: str  # product with a table of tokens
    bias: str = ""  # name of the bias in a module of its own, which is that of `output` if they are tied
    activation: Activation | None = None  # None: that of the layers


_BERT = _Modules(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
_ROBERTA = _Modules("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", "gelu")
_MODULES: Mapping[str, _Modules] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "jina_embeddings_v3": _ROBERTA,
    "electra": _Modules(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", activation="gelu"
    ),
    "distilbert": _Modules("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    "albert": _Modules("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"),
    "modernbert": _Modules("head.dense", "head.norm", "decoder"),
}
FAMILIES = tuple(_MODULES)  # names of the families whose masked language models predict tokens
# Versions of transformers differ in the tensor that they use.
_TIED = "although tie_word_embeddings in config.json is true; set it to false to use both, or remove one of them"


def with_predictions(model: Description, config: Config, tensors: Tensors) -> Description:
    """Add the head of a masked language model, if the checkpoint has it.

    A checkpoint without the tensors of the head was saved as one of the encoder alone.
    """
    architecture = next(iter(config.get("architectures", None) or ()), "")
    modules = _MODULES.get(model.family)
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")) and config.boolean("tie_word_embeddings", True):
        _name_table(model.family, f"{(modules or _BERT).output}.weight", tensors)
    if modules is None or not architecture.endswith("ForMaskedLM") or f"{modules.dense}.weight" not in tensors:
        return model
    stack = model.encoder_stack
    predictions = Predictions(
        size=stack.width if stack.embedding.projected_from is None else stack.embedding.projected_from,
        activation=modules.activation or stack.feed_forward.activation,
        is_tied=config.boolean("tie_word_embeddings", True),
    )
    if model.family == "modernbert":
        predictions = replace(
            predictions,
            size=stack.width,
            activation=activation(config.text("classifier_activation", "gelu")),
            has_bias=config.boolean("classifier_bias", False),
            has_output_bias=config.boolean("decoder_bias", True),
        )
    return replace(model, predictions=predictions)


def _name_table(family: str, projection: str, tensors: Tensors) -> None:
    """Give the table of embeddings its name if it is stored as the projection alone."""
    table = "tok_embeddings.weight" if family == "modernbert" else "word_embeddings.weight"
    stored = [name.partition("embeddings.")[0] for name in tensors.names if re.search(r"\bembeddings\.", name)]
    if stored and projection in tensors.names and not any(name.endswith(table) for name in tensors.names):
        tensors.rename(projection, f"{stored[0]}embeddings.{table}")


def prediction_modules(model: Description, modules: Mapping[str, Source], tensors: Tensors) -> dict[str, Source]:
    """Return the modules of the head of a model, given its other modules."""
    if model.predictions is None:
        return {}
    names = _MODULES[model.family]
    sources: dict[str, Source] = {
        "prediction.dense": names.dense,
        "prediction.norm": names.norm,
        "prediction.output": names.output,
    }
    if f"{names.norm}.gamma" in tensors:  # names of TensorFlow
        sources |= {"prediction.norm.weight": f"{names.norm}.gamma", "prediction.norm.bias": f"{names.norm}.beta"}
    if not model.predictions.is_tied:
        return sources
    table = modules["embedding"]
    assert isinstance(table, str), "the table of embeddings is stored as it is"
    sources["prediction.output.weight"] = f"{table}.weight"
    tensors.check_equal(f"{table}.weight", f"{names.output}.weight", _TIED)
    tensors.check_equal(names.bias, f"{names.output}.bias", _TIED)
    if names.bias in tensors:
        sources["prediction.output.bias"] = names.bias
    return sources
