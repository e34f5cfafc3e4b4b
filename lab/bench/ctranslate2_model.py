"""Convert Sightline's Transformer to a CTranslate2 model, with CTranslate2's own specifications."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from ctranslate2.specs import TransformerSpec
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from sightline.model.architectures.transformer import Transformer
from sightline.model.layers.multi_head_attention import MultiHeadAttention
from sightline.model.layers.transformer_layer import DecoderLayer, EncoderLayer


def write_ctranslate2_model(folder: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    """Write a float32 model to a new folder; CTranslate2 quantizes while it loads. If the model's
    vocabulary is larger than the tokenizer's, the missing names are made up.
    """
    config = model.config
    spec = TransformerSpec.from_config((config.encoder_layers, config.decoder_layers), config.num_heads, pre_norm=False)
    _embed(spec.encoder, spec.encoder.embeddings[0], model)
    _embed(spec.decoder, spec.decoder.embeddings, model)
    spec.decoder.projection.weight = _array(model.embedding.weight)
    for layer_spec, block in zip(spec.encoder.layer, cast(Iterable[EncoderLayer], model.encoder), strict=True):
        _block(layer_spec, block)
    for layer_spec, layer in zip(spec.decoder.layer, cast(Iterable[DecoderLayer], model.decoder), strict=True):
        _block(layer_spec, layer)
        cross, norm = layer.cross_attention, layer.cross_attention_norm.norm
        _attention(layer_spec.attention, [[cross.query], [cross.key, cross.value], [cross.output]], norm)
    vocabulary = vocabulary_of(tokenizer, config.vocab_size)
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.bos_token = spec.config.decoder_start_token = vocabulary[config.bos_id]
    spec.config.eos_token = vocabulary[config.eos_id]
    spec.config.unk_token = vocabulary[config.pad_id]  # a byte-level vocabulary has no unknown token
    spec.config.layer_norm_epsilon = layer.feed_forward_norm.norm.eps
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir(parents=True)
    spec.save(str(folder))


def vocabulary_of(tokenizer: Tokenizer, size: int) -> list[str]:
    return [tokenizer.id_to_token(id_) or f"<{id_}>" for id_ in range(size)]


def _embed(spec: Any, embeddings: Any, model: Transformer) -> None:
    embeddings.weight = _array(model.embedding.weight)
    spec.scale_embeddings = True  # multiply by the square root of the width
    spec.position_encodings.encodings = _array(model.positions)


def _block(spec: Any, layer: EncoderLayer | DecoderLayer) -> None:
    """Set the weights of self-attention and feed-forward."""
    own = layer.self_attention
    assert isinstance(own, MultiHeadAttention), "CTranslate2 supports no other self-attention"
    _attention(spec.self_attention, [[own.query, own.key, own.value], [own.output]], layer.self_attention_norm.norm)
    _linear(spec.ffn.linear_0, [layer.feed_forward.inner])
    _linear(spec.ffn.linear_1, [layer.feed_forward.outer])
    _norm(spec.ffn.layer_norm, layer.feed_forward_norm.norm)


def _attention(spec: Any, linears: Sequence[Sequence[nn.Linear]], norm: nn.LayerNorm) -> None:
    for linear_spec, packed in zip(spec.linear, linears, strict=True):
        _linear(linear_spec, packed)
    _norm(spec.layer_norm, norm)


def _linear(spec: Any, packed: Sequence[nn.Linear]) -> None:
    """Set one product whose outputs are those of several layers, concatenated."""
    spec.weight = np.concatenate([_array(linear.weight) for linear in packed])
    spec.bias = np.concatenate([_array(linear.bias) for linear in packed])


def _norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().numpy()
    return array
