"""Decoder-only models that read texts and generate none: embedding models, classifiers, rerankers.

They are described as encoders whose attention is causal, because one call then reads whole texts of
several requests, and because pooling, labels and attention maps are those of other encoders.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from sightline.export.families import Family
from sightline.export.families.description import Description, Head
from sightline.export.families.encoders import label_kind, label_names
from sightline.export.families.weights import Array, Source
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Tensors

CLASSIFIER = "ForSequenceClassification"
IGNORED = ("lm_head.weight",)  # which a class without a projection to the vocabulary does not read
RELEVANT = ("relevant",)  # label of a reranker
Modules = Callable[[Description, Tensors], Mapping[str, Source]]


def generates_text(config: Config) -> bool:
    """Return False if the class of a checkpoint has no projection to the vocabulary."""
    architecture = _architecture(config)
    return not architecture.endswith(("Model", CLASSIFIER)) or architecture.endswith(("LMHeadModel", "MTModel"))


def _architecture(config: Config) -> str:
    return str(next(iter(config.get("architectures", None) or ()), ""))


def family_of(
    name: str,
    classes: tuple[str, ...],
    describe: Callable[[Config, Tensors], Description],
    modules: Modules,
    ignored: tuple[str, ...] = (),
) -> Family:
    """Return a family of decoder-only models with its classes that generate no text.

    Args:
        name: `model_type` of config.json.
        classes: names of the classes that generate text, return hidden states, and, if there is
            one, label texts.
        ignored: patterns of tensors that do not change the output.
    """
    return Family(name, classes, _describer(describe), _module_namer(modules), (*ignored, *IGNORED), base=classes[1])


def classes_of(start: str) -> tuple[str, str, str]:
    """Return the usual names of the classes of a family, such as "Llama"."""
    return f"{start}ForCausalLM", f"{start}Model", f"{start}{CLASSIFIER}"


def as_encoder(model: Description) -> Description:
    """Describe a decoder-only model as an encoder."""
    return replace(model, encoder=replace(model.decoder_stack, is_causal=True), decoder=None)


def as_reranker(model: Description, answers: tuple[int, int | None]) -> Description:
    """Describe a model that generates text as a reranker.

    Args:
        answers: token ids of the answers yes and no. The score is the difference of their logits,
            whose sigmoid is the probability of yes among the two. Without no, it is that of yes.
    """
    largest = max(answers[0], answers[1] or 0)
    if largest >= model.vocabulary:
        raise ImportFailedError(
            f"the module LogitScore names the token id {largest}, but the model has {model.vocabulary} tokens"
        )
    if model.decoder is None or model.logits_softcap is not None or model.logits_scale != 1.0:
        raise ImportFailedError(
            "a reranker that answers yes or no needs a model that generates text, whose logits are the product with "
            "the table of the vocabulary"
        )
    head = Head("last", "score", has_output_bias=False, answers=answers)
    return replace(as_encoder(model), head=head, labels=RELEVANT)


def _describer(describe: Callable[[Config, Tensors], Description]) -> Callable[[Config, Tensors], Description]:
    def of_class(config: Config, tensors: Tensors) -> Description:
        config.ignore("is_decoder", "is_llama_config", "unsloth_*")
        config.neutral("is_encoder_decoder", False)
        config.neutral("add_cross_attention", False)
        model = describe(config, tensors)
        if generates_text(config):
            return model
        model = model if model.decoder is None else as_encoder(model)
        if not _architecture(config).endswith(CLASSIFIER):
            return model
        labels, padding = label_names(config), config.get("pad_token_id", None)
        head = Head("last", label_kind(config, len(labels)), has_output_bias=False, padding=padding)
        return replace(model, head=head, labels=labels)

    return of_class


def _module_namer(modules: Modules) -> Modules:
    def of_class(model: Description, tensors: Tensors) -> Mapping[str, Source]:
        sources = dict(modules(model, tensors))
        if model.decoder is not None:
            return sources
        output = sources.pop("output.weight", sources["embedding"])
        sources = {name.replace("decoder.", "encoder.", 1): source for name, source in sources.items()}
        if model.head is not None and model.head.answers is not None:
            assert isinstance(output, str), "the table of the vocabulary is a whole tensor"
            table, answers = f"{output.removesuffix('.weight')}.weight", model.head.answers
            sources["head.output.weight"] = lambda: _difference(tensors.read(table), answers)
        elif model.head is not None:
            sources["head.output"] = "score"
        return sources

    return of_class


def _difference(table: Array, answers: tuple[int, int | None]) -> Array:
    """Return the difference (1, M) of the rows of two answers in a table (V, M)."""
    yes, no = answers
    difference = table[yes].astype(np.float64) - (0 if no is None else table[no].astype(np.float64))
    row: Array = difference.astype(np.float32)[None]
    return row
