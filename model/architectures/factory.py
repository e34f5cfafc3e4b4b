"""Construction of a model from its configuration."""

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
    if isinstance(config, CausalConfig):
        return CausalModel(config)
    if isinstance(config, TaggerConfig):
        return Tagger(config)
    if isinstance(config, ClassifierConfig):
        return Classifier(config)
    if isinstance(config, EncoderConfig):
        return TextEncoder(config)
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(config)
    if isinstance(config, PretrainedConfig):
        return _PRETRAINED[config.task](config)
    assert isinstance(config, TransformerConfig), "every configuration has a model"
    return Transformer(config)
