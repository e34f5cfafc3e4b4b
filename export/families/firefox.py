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

from export.errors import ImportFailedError
from export.families.description import Attention, Description, Embedding, FeedForward, Norm, Stack
from export.families.values import timescale_sinusoids
from export.families.weights import Array, Source, Weights
from export.sources.checkpoint import Config, StoredTensor, Tensors
from export.sources.generation import Generation
from service.bundle import GenerationDefaults

MAX_POSITIONS = 512  # not a limit of the architecture: the engine of Firefox wraps texts at 128 tokens
END_ID = 0
# Logit of the start token, which Marian does not have in its vocabulary. In float32, its
# probability is exactly 0 unless all other logits are below -96. The number is not lower, because
# the limits of the verification grow with the largest absolute logit.
_NEVER = -200.0

CONFIG = "special:model.yml"  # name of the configuration in a Marian file
MAX_COUNT = 1000  # of layers or heads
# Options that must be there with these values.
_REQUIRED: Mapping[str, str] = {
    "type": "transformer",
    "transformer-decoder-autoreg": "rnn",
    "dec-cell": "ssru",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",  # dropout (not in inference), addition, normalization
    "transformer-ffn-activation": "relu",
}
# Options that may be missing, because they are newer than some models, or have one of these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "dec-cell-base-depth": (2,),
    "input-types": ((),),
    "lemma-dependency": ("", ()),
    "lemma-dim-emb": (0,),
    "output-omit-bias": (False,),
    "right-left": (False,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-ffn-depth": (2,),
    "transformer-no-affine": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-projection": (False,),
    "transformer-pool": (False,),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-postprocess-top": ("",),
    "transformer-rnn-projection": (False,),
    "transformer-tied-layers": ((),),
    "transformer-train-position-embeddings": (False,),
    "ulr": (False,),
}
# Options of other architectures or of training, and options that the names of tensors decide.
_IGNORED = (
    "bert-train-type-embeddings bert-type-vocab-size dec-cell-high-depth dim-rnn enc-cell enc-cell-depth enc-type "
    "factors-combine factors-dim-emb layer-normalization skip special-vocab tied-embeddings tied-embeddings-all "
    "tied-embeddings-src transformer-aan-activation transformer-aan-depth transformer-aan-nogate "
    "transformer-depth-scaling transformer-dim-aan ulr-dim-emb ulr-trainable-transformation version"
)

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


def describe(settings: Mapping[str, Any], tensors: Tensors, file: str) -> Description:
    """Describe a model, and check its options and the names and shapes of all its tensors.

    Args:
        settings: content of the tensor `special:model.yml`, with lists as tuples.
        tensors: the other tensors, by the names of Marian. Nothing is read.
        file: name of the model file in errors.

    Raises:
        ImportFailedError: an option or a tensor is missing, unknown or not supported.
    """
    source = f"{file}: {CONFIG}"
    config = Config(settings, source)
    config.ignore(*_IGNORED.split())
    for key, expected in _REQUIRED.items():
        if (value := config.get(key)) != expected:
            raise ImportFailedError(
                f"{source}: {key} must be {expected!r}, got {value!r}; only the architecture of Firefox's translation "
                "models is supported"
            )
    for key, values in _NEUTRAL.items():
        config.neutral(key, *values)
    layers = {"encoder": _count(config, "enc-depth", source), "decoder": _count(config, "dec-depth", source)}
    heads, width = _count(config, "transformer-heads", source), config.integer("dim-emb")
    if width < 4 or width % 2 or width % heads:
        raise ImportFailedError(
            f"{source}: dim-emb must be even, at least 4 and divisible by the {heads} heads, got {width}; "
            "download the model again"
        )
    sizes, is_shared = config.get("dim-vocabs"), "Wemb" in tensors
    if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(isinstance(one, int) and one > 0 for one in sizes):
        raise ImportFailedError(
            f"{source}: dim-vocabs must be a list of two positive integers, the sizes of the source and the target "
            f"vocabulary, got {sizes!r}; download the model again"
        )
    if is_shared and sizes[0] != sizes[1]:
        raise ImportFailedError(
            f"{source}: dim-vocabs must be two equal sizes, because source and target share the table 'Wemb', got "
            f"{sizes!r}; download the model again"
        )
    inner = config.integer("transformer-dim-ffn")
    inners = {"encoder": inner, "decoder": config.integer("transformer-decoder-dim-ffn", 0) or inner}
    guided_layer = _guided_layer(config, layers["decoder"], source)
    config.check_all_read()
    _check_tensors(tensors, _shapes(layers, width, inners, sizes, is_shared=is_shared), file)
    attention = Attention(heads, heads, width // heads, (width // heads) ** -0.5)

    def stack(name: str) -> Stack:
        return Stack(
            width,
            Norm("layer", 1e-6),  # as in src/models/transformer.h of Marian
            "post",
            (attention,) * layers[name],
            FeedForward("relu"),
            Embedding(math.sqrt(width), has_positions=True),
            cross=attention if name == "decoder" else None,
            cell="ssru" if name == "decoder" else "attention",
        )

    # The start token is added to the vocabulary.
    return Description(
        "firefox",
        sizes[1] + 1,
        MAX_POSITIONS,
        stack("encoder"),
        stack("decoder"),
        guided_alignment=(guided_layer, 0),  # Marian trains the first head of a layer
    )


def _count(config: Config, key: str, source: str) -> int:
    value = config.integer(key)
    if not 1 <= value <= MAX_COUNT:
        raise ImportFailedError(f"{source}: {key} must be from 1 to {MAX_COUNT}, got {value}; download the model again")
    return value


def _guided_layer(config: Config, layers: int, source: str) -> int:
    """Return the index of the decoder layer that was trained on word alignments.

    The option is "last", or the number of a layer, starting with 1.
    """
    key = "transformer-guided-alignment-layer"
    value = config.get(key, "last")
    if value == "last":
        return layers - 1
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= layers:
        raise ImportFailedError(
            f'{source}: {key} must be "last" or from 1 to {layers}, the number of decoder layers, got {value!r}; '
            "download the model again"
        )
    return value - 1


def _shapes(
    layers: Mapping[str, int], width: int, inners: Mapping[str, int], sizes: tuple[int, int], *, is_shared: bool
) -> dict[str, tuple[int, int]]:
    """Return the shapes of all tensors by name.

    Args:
        layers: number of layers of encoder and decoder.
        width: size of the embeddings and the hidden states.
        inners: inner size of the feed-forward layers of encoder and decoder.
        sizes: sizes of the source and the target vocabulary.
        is_shared: True if source and target have one table of embeddings.
    """
    vector, matrix = (1, width), (width, width)
    shapes = {"decoder_ff_logit_out_b": (1, sizes[1])}
    if is_shared:
        shapes["Wemb"] = (sizes[1], width)
    else:
        shapes |= {"encoder_Wemb": (sizes[0], width), "decoder_Wemb": (sizes[1], width)}
    for stack, attention in (("encoder", "self"), ("decoder", "context")):
        inner = inners[stack]
        for number in range(1, layers[stack] + 1):
            layer = f"{stack}_l{number}"
            for letter in _PROJECTIONS:
                shapes |= {f"{layer}_{attention}_W{letter}": matrix, f"{layer}_{attention}_b{letter}": vector}
            shapes |= {f"{layer}_ffn_W1": (width, inner), f"{layer}_ffn_b1": (1, inner)}
            shapes |= {f"{layer}_ffn_W2": (inner, width), f"{layer}_ffn_b2": vector}
            norms = [f"{attention}_Wo", "ffn_ffn"]
            if stack == "decoder":
                shapes |= {f"{layer}_rnn_W": matrix, f"{layer}_rnn_Wf": matrix, f"{layer}_rnn_bf": vector}
                norms.append("rnn_ffn")
            shapes |= {f"{layer}_{norm}_ln_{part}": vector for norm in norms for part in ("scale", "bias")}
    return shapes


def _check_tensors(tensors: Tensors, shapes: Mapping[str, tuple[int, int]], file: str) -> None:
    """Check that a model has exactly the tensors that its configuration implies.

    Raises:
        ImportFailedError: a tensor is missing, unknown or has another shape.
    """
    missing, unknown = shapes.keys() - tensors.names, tensors.names - shapes.keys()
    if missing:
        raise ImportFailedError(
            f"{file} has no tensor {min(missing)!r}, which {CONFIG} implies ({len(missing)} are missing); download the "
            "model again"
        )
    if unknown:
        raise ImportFailedError(
            f"{file} has a tensor {min(unknown)!r} that is not known ({len(unknown)} are unknown); the model may be an "
            "unsupported variant, so it is not imported"
        )
    for name, shape in shapes.items():
        if tensors.shape(name) != shape:
            raise ImportFailedError(
                f"{file}: the tensor {name!r} must have the shape {list(shape)}, which {CONFIG} implies, got "
                f"{list(tensors.shape(name))}; download the model again"
            )


def vocabulary_sizes(tensors: Tensors) -> tuple[int, int]:
    """Return the numbers of source and target tokens of a model that `describe` has accepted."""
    tables = ("Wemb", "Wemb") if "Wemb" in tensors else ("encoder_Wemb", "decoder_Wemb")
    return tensors.shape(tables[0])[0], tensors.shape(tables[1])[0]


def guided_alignment(model: Description) -> tuple[int, int] | None:
    """Return layer and head of the cross-attention that was trained on word alignments.

    See Chen et al. 2016, Guided Alignment Training for Topic-Aware Neural Machine Translation.

    Returns:
        Indices from 0, or None if the model was not trained with guided alignment.
    """
    return model.guided_alignment


def read_weights(model: Description, tensors: Tensors) -> Weights:
    """Return the weights of a model by the names of the builder.

    Args:
        model: result of `describe` for these tensors.
        tensors: float32 tensors by the names of Marian, with the shapes that the file declares.
    """
    assert model.encoder is not None, "the model has an encoder"
    stored: dict[str, StoredTensor] = {}
    for name in sorted(tensors.names):
        module = _module(name)
        stored[module] = StoredTensor(tensors.shape(name), partial(_read, tensors, name, module))
    modules: dict[str, Source] = {}
    for name in stored:
        module = re.sub(r"\.\d+\.", ".{}.", name).rpartition(".")[0]
        modules[module] = module
    for stack in ("encoder", "decoder"):
        modules[f"{stack}.positions"] = partial(timescale_sinusoids, model.max_positions, model.encoder.width)
    return Weights(Tensors(stored), modules)


def _module(name: str) -> str:
    """Return the name in the builder of a tensor of Marian that `describe` has accepted."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _TENSORS[name]
    stack, layer, rest = match.groups()
    return f"{stack}.{int(layer) - 1}.{_LAYER_TENSORS[rest]}"


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
