"""Construction of a model from its configuration."""

from model.architectures.causal import CausalModel
from model.architectures.classifier import Classifier
from model.architectures.recurrent import RecurrentModel
from model.architectures.transformer import Transformer
from model.config import CausalConfig, ClassifierConfig, ModelConfig, RecurrentConfig, TransformerConfig

TranslationModel = Transformer | RecurrentModel
Model = TranslationModel | Classifier | CausalModel


def build_model(config: ModelConfig) -> Model:
    """Return a model with newly initialized weights, in training mode, on the CPU."""
    if isinstance(config, CausalConfig):
        return CausalModel(config)
    if isinstance(config, ClassifierConfig):
        return Classifier(config)
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(config)
    assert isinstance(config, TransformerConfig), "every configuration has a model"
    return Transformer(config)
