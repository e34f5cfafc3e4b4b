"""Construction of a model from its configuration."""

from model.architectures.bert import BertClassifier, BertEncoder
from model.architectures.causal import CausalModel
from model.architectures.classifier import Classifier
from model.architectures.encoder import TextEncoder
from model.architectures.llama import Llama
from model.architectures.recurrent import RecurrentModel
from model.architectures.transformer import Transformer
from model.config import (
    CausalConfig,
    ClassifierConfig,
    EncoderConfig,
    ModelConfig,
    PretrainedConfig,
    RecurrentConfig,
    TransformerConfig,
)

TranslationModel = Transformer | RecurrentModel
PretrainedModel = BertClassifier | BertEncoder | Llama
Model = TranslationModel | Classifier | CausalModel | TextEncoder | PretrainedModel


def build_model(config: ModelConfig) -> Model:
    """Return a model with newly initialized weights, in training mode, on the CPU."""
    if isinstance(config, CausalConfig):
        return CausalModel(config)
    if isinstance(config, ClassifierConfig):
        return Classifier(config)
    if isinstance(config, EncoderConfig):
        return TextEncoder(config)
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(config)
    if isinstance(config, PretrainedConfig):
        return _build_pretrained(config)
    assert isinstance(config, TransformerConfig), "every configuration has a model"
    return Transformer(config)


def _build_pretrained(config: PretrainedConfig) -> PretrainedModel:
    if config.task == "language-model":
        return Llama(config)
    return BertClassifier(config) if config.task == "classification" else BertEncoder(config)
