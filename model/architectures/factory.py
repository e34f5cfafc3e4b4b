"""Construction of a model from its configuration."""

from collections.abc import Mapping
from typing import Any

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.classifier import Classifier, Tagger
from sightline.model.architectures.encoder import TextEncoder
from sightline.model.architectures.pretrained import (
    PretrainedClassifier,
    PretrainedDecoder,
    PretrainedEncoder,
    PretrainedModel,
    PretrainedReranker,
    PretrainedTagger,
    PretrainedTranslator,
)
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.architectures.transformer import Transformer
from sightline.model.config import (
    ArchitectureConfig,
    CausalConfig,
    ClassifierConfig,
    EncoderConfig,
    PretrainedConfig,
    RecurrentConfig,
    TaggerConfig,
    TransformerConfig,
)

TranslationModel = Transformer | RecurrentModel | PretrainedTranslator
TaggingModel = Tagger | PretrainedTagger
Model = TranslationModel | Classifier | CausalModel | TextEncoder | PretrainedModel
_OWN: Mapping[type[ArchitectureConfig], Any] = {
    CausalConfig: CausalModel,
    ClassifierConfig: Classifier,
    EncoderConfig: TextEncoder,
    RecurrentConfig: RecurrentModel,
    TaggerConfig: Tagger,
    TransformerConfig: Transformer,
}
_PRETRAINED = {
    "classification": PretrainedClassifier,
    "encoder": PretrainedEncoder,
    "language-model": PretrainedDecoder,
    "reranking": PretrainedReranker,
    "tagging": PretrainedTagger,
    "translation": PretrainedTranslator,
}


def build_model(config: ArchitectureConfig) -> Model:
    """Return a model with newly initialized weights, in training mode, on the CPU."""
    if isinstance(config, PretrainedConfig):
        return _PRETRAINED[config.task](config)
    model: Model = _OWN[type(config)](config)
    return model
