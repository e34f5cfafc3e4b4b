"""Models with random weights whose graphs the tests compare with Transformers, by family.

The tables of `docs/models.md` list them.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.export import (
    decoder_models,
    encoder_models,
    test_bart_classifier,
    test_causal_encoders,
    test_encoder_families,
    test_jina,
    test_seq2seq_families,
)


@dataclass(frozen=True)
class ComparedModel:
    """Sizes and options of a model, and the classes of Transformers that are compared with them."""

    family: str
    name: str  # in the names of tests
    classes: tuple[str, ...]


@functools.cache
def compared_models() -> tuple[ComparedModel, ...]:
    return tuple(_models())


def _models() -> Iterator[ComparedModel]:
    for name, config in decoder_models.MODELS.items():
        yield ComparedModel(config.model_type, name, (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type],))
    for name, case in encoder_models.FAMILIES.items():
        title = f"{name} as encoder" if name in decoder_models.MODELS else name
        yield ComparedModel(case.make_config().model_type, title, tuple(f"{case.family}{task}" for task in case.tasks))
    for name, case in encoder_models.SHAPES.items():
        yield ComparedModel(case.make_config().model_type, name, (f"{case.family}ForSequenceClassification",))
    for name in test_encoder_families.PRETRAINING:
        yield ComparedModel(name, name, (f"{encoder_models.FAMILIES[name].family}ForPreTraining",))
    for name in test_encoder_families.ORIGINAL_GTE_SHAPES:
        yield ComparedModel("new", name.replace("gte", "new"), ("NewForSequenceClassification",))
    for name in test_jina.SHAPES:
        yield ComparedModel("jina_bert", name, ("JinaBertForMaskedLM",))
    for name in test_causal_encoders.RERANKERS:
        yield ComparedModel("qwen3", name, ("Qwen3ForCausalLM",))
    for one in (*test_seq2seq_families.CASES, *test_seq2seq_families.SHAPES):
        yield ComparedModel(one.family.name, one.name, (one.architecture,))
    for name in test_bart_classifier.SHAPES:
        yield ComparedModel("bart", f"classifier {name}", ("BartForSequenceClassification",))
    for start in test_encoder_families.T5_ENCODERS:
        yield ComparedModel(start.lower(), f"{start.lower()} as encoder", (f"{start}EncoderModel",))
