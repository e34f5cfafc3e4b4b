"""Firefox translation models: students that Marian trained (Junczys-Dowmunt et al. 2018).

The encoder is a post-norm Transformer. The decoder has recurrent units in place of self-attention
(Kim et al. 2019, section 3.1).
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from export.checkpoint import Config, StoredTensor, Tensors
from export.description import Attention, Description, Embedding, FeedForward, Norm, Stack
from export.errors import ImportFailedError
from export.families.options import activation, timescale_sinusoids
from export.firefox.description import IGNORED, NEUTRAL, REQUIRED
from export.generation import Generation
from export.weights import Array, Source, Weights
from service.bundle import GenerationDefaults

MAX_POSITIONS = 512  # not a limit of the architecture: the engine of Firefox wraps texts at 128 tokens
END_ID = 0
# Logit of the start token, which Marian does not have in its vocabulary. In float32, its
# probability is exactly 0 unless all other logits are below -96. The number is not lower, because
# the limits of the verification grow with the largest absolute logit.
_NEVER = -200.0

_LAYER = re.compile(r"(encoder|decoder)_l(\d+)_(\w+)")
_ATTENTION = {"self": "self_attention", "context": "cross_attention"}
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "output"}
# Names in the builder of the tensors of a layer. The loop below adds those of attention.
_LAYER_TENSORS = {
    "ffn_W1": "feed_forward.inner.weight",
    "ffn_b1": "feed_forward.inner.bias",
    "ffn_W2": "feed_forward.outer.weight",
    "ffn_b2": "feed_forward.outer.bias",
    "ffn_ffn_ln_scale": "feed_forward_norm.weight",
    "ffn_ffn_ln_bias": "feed_forward_norm.bias",
    "rnn_W": "cell.input.weight",
    "rnn_Wf": "cell.forget.weight",
    "rnn_bf": "cell.forget.bias",
    "rnn_ffn_ln_scale": "self_attention_norm.weight",
    "rnn_ffn_ln_bias": "self_attention_norm.bias",
}
for _short, _long in _ATTENTION.items():
    _LAYER_TENSORS[f"{_short}_Wo_ln_scale"] = f"{_long}_norm.weight"
    _LAYER_TENSORS[f"{_short}_Wo_ln_bias"] = f"{_long}_norm.bias"
    for _letter, _projection in _PROJECTIONS.items():
        _LAYER_TENSORS[f"{_short}_W{_letter}"] = f"{_long}.{_projection}.weight"
        _LAYER_TENSORS[f"{_short}_b{_letter}"] = f"{_long}.{_projection}.bias"
_TENSORS = {
    "Wemb": "embedding.weight",
    "encoder_Wemb": "encoder.embedding.weight",
    "decoder_Wemb": "decoder.embedding.weight",
    "decoder_ff_logit_out_b": "output.bias",
}
_MATRIX = re.compile(r"_W[qkvof12]?$")  # stored as (inputs, outputs)


def describe(settings: Mapping[str, Any]) -> Description:
    """Describe a model.

    Args:
        settings: content of the tensor `special:model.yml`, with lists as tuples.

    Raises:
        ImportFailedError: a setting is missing, unknown or not supported.
    """
    config = Config(settings, "special:model.yml")
    config.ignore(*IGNORED)
    for key, value in REQUIRED.items():
        config.get(key)  # must be there
        config.neutral(key, value)
    for key, values in NEUTRAL.items():
        config.neutral(key, *values)
    width, heads = config.integer("dim-emb"), config.integer("transformer-heads")
    function = activation(config.text("transformer-ffn-activation"))
    sizes = config.get("dim-vocabs")
    attention = Attention(heads, heads, width // heads, (width // heads) ** -0.5)

    def stack(name: str, layers: int) -> Stack:
        return Stack(
            width,
            Norm("layer", 1e-6),  # as in src/models/transformer.h of Marian
            "post",
            (attention,) * layers,
            FeedForward(function),
            Embedding(math.sqrt(width), has_positions=True),
            cross=attention if name == "decoder" else None,
            cell="ssru" if name == "decoder" else "attention",
        )

    encoder, decoder = stack("encoder", config.integer("enc-depth")), stack("decoder", config.integer("dec-depth"))
    config.check_all_read()
    # The start token is added to the vocabulary.
    return Description("firefox", int(sizes[-1]) + 1, MAX_POSITIONS, encoder, decoder)


def read_weights(model: Description, tensors: Tensors) -> Weights:
    """Return the weights of a model by the names of the builder.

    Args:
        model: result of `describe`.
        tensors: float32 tensors by the names of Marian, with the shapes that the file declares.
            Those without an effect are marked as known. Call `check_all_read` after the graphs are
            built.

    Raises:
        ImportFailedError: the table of target tokens has another size than the description.
    """
    tensors.ignore("*_QuantMultA", "special:*")
    assert model.encoder is not None, "the model has an encoder"
    table = "Wemb" if "Wemb" in tensors else "decoder_Wemb"
    rows, expected = tensors.shape(table)[0], model.vocabulary - 1
    if rows != expected:
        raise ImportFailedError(
            f"the tensor {table!r} has {rows} rows, but dim-vocabs has {expected} tokens; download the model again"
        )
    stored: dict[str, StoredTensor] = {}
    for name in sorted(tensors.names):
        module = _module(name)
        if module is not None:
            stored[module] = StoredTensor(tensors.shape(name), partial(_read, tensors, name, module))
    modules: dict[str, Source] = {}
    for name in stored:
        module = re.sub(r"\.\d+\.", ".{}.", name).rpartition(".")[0]
        modules[module] = module
    for stack in ("encoder", "decoder"):
        modules[f"{stack}.positions"] = partial(timescale_sinusoids, model.max_positions, model.encoder.width)
    return Weights(Tensors(stored), modules)


def _module(name: str) -> str | None:
    """Return the name in the builder of a tensor of Marian, or None if it is unknown."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _TENSORS.get(name)
    stack, layer, rest = match.groups()
    return f"{stack}.{int(layer) - 1}.{_LAYER_TENSORS[rest]}" if rest in _LAYER_TENSORS else None


def _read(tensors: Tensors, name: str, module: str) -> Array:
    array = tensors.read(name)
    if _MATRIX.search(name):
        array = array.T
    if module in ("embedding.weight", "decoder.embedding.weight"):
        # The decoder starts with a zero vector, which is the embedding of the added start token.
        return np.pad(array, [(0, 1), (0, 0)])
    if module == "output.bias":
        return np.append(array, np.float32(_NEVER))
    is_matrix = _MATRIX.search(name) is not None or module == "encoder.embedding.weight"
    return array if is_matrix else array.reshape(-1)


def generation(model: Description, unknown_id: int | None = 1) -> Generation:
    """Return the special tokens, and settings for greedy search without unknown tokens."""
    start_id = model.vocabulary - 1
    suppressed = (start_id,) if unknown_id is None else (unknown_id, start_id)
    defaults = GenerationDefaults(suppress_tokens=suppressed, num_beams=1)
    # Padding of a source needs a token of the source vocabulary, which may be the smaller one.
    return Generation(pad_id=END_ID, start_ids=(start_id,), end_ids=(END_ID,), defaults=defaults)


def alignment_head(model: Description) -> tuple[int, int]:
    """Return layer and head of the cross-attention that was trained to align words.

    Guided alignment trains the first head of the last layer.
    """
    assert model.decoder is not None, "the model has a decoder"
    return model.decoder.layers - 1, 0
