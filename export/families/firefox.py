"""Firefox translation models: students that Marian trained (Junczys-Dowmunt et al. 2018).

The encoder is a post-norm Transformer. The decoder has recurrent units in place of self-attention
(Kim et al. 2019, section 3.1).
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from sightline.base.bundle import GenerationDefaults
from sightline.export.families.description import Attention, Description, FeedForward, Norm, Stack, TokenEmbedding
from sightline.export.families.shapes import check_shapes
from sightline.export.families.values import count, timescale_sinusoids
from sightline.export.families.weights import AdaptedModule, Source, Weights
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.firefox.marian_binary import CONFIG
from sightline.export.sources.generation_settings import GenerationSettings
from sightline.export.sources.opened_checkpoint import Config, Tensors

MAX_POSITIONS = 512  # not a limit of the architecture: the engine of Firefox wraps texts at 128 tokens
END_ID = 0
# Logit of the start token, which Marian does not have in its vocabulary. In float32, its
# probability is exactly 0 unless all other logits are below -96. The number is not lower, because
# the limits of the verification grow with the largest absolute logit.
_NEVER = -200.0

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
    "input-types": ([],),
    "lemma-dependency": ("", []),
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
    "transformer-tied-layers": ([],),
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

_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "output"}
# Names in the builder of the tensors of a layer by those of Marian.
_FEED_FORWARD = {
    "ffn_W1": "feed_forward.inner.weight",
    "ffn_b1": "feed_forward.inner.bias",
    "ffn_W2": "feed_forward.outer.weight",
    "ffn_b2": "feed_forward.outer.bias",
    "ffn_ffn_ln_scale": "feed_forward_norm.weight",
    "ffn_ffn_ln_bias": "feed_forward_norm.bias",
}
_CELL = {
    "rnn_W": "cell.input.weight",
    "rnn_Wf": "cell.forget.weight",
    "rnn_bf": "cell.forget.bias",
    "rnn_ffn_ln_scale": "self_attention_norm.weight",
    "rnn_ffn_ln_bias": "self_attention_norm.bias",
}


def _attention_tensors(short: str, long: str) -> dict[str, str]:
    names = {f"{short}_Wo_ln_scale": f"{long}_norm.weight", f"{short}_Wo_ln_bias": f"{long}_norm.bias"}
    for letter, projection in _PROJECTIONS.items():
        names |= {
            f"{short}_W{letter}": f"{long}.{projection}.weight",
            f"{short}_b{letter}": f"{long}.{projection}.bias",
        }
    return names


_LAYER_TENSORS = {
    "encoder": _FEED_FORWARD | _attention_tensors("self", "self_attention"),
    "decoder": _FEED_FORWARD | _CELL | _attention_tensors("context", "cross_attention"),
}
_MATRIX = re.compile(r"[a-z]+_W[qkvof12]?")


def describe(
    settings: Mapping[str, Any], tensors: Tensors, file: str, max_tokens: int | None = None
) -> tuple[Description, Weights]:
    """Describe a model, and check the shapes of its tensors; an unknown option is an error.

    Args:
        settings: content of the tensor `special:model.yml`.
        tensors: the other tensors, by the names of Marian. Nothing is read.
        file: name of the model file in errors.
        max_tokens: lower limit of positions than `MAX_POSITIONS`.
    """
    source = f"{file}: {CONFIG}"
    config = Config(settings, source)
    config.ignore(*_IGNORED.split())
    for key, expected in _REQUIRED.items():
        config.get(key)  # a missing one is an error
        config.neutral(key, expected)
    for key, values in _NEUTRAL.items():
        config.neutral(key, *values)
    layers = {"encoder": count(config, "enc-depth"), "decoder": count(config, "dec-depth")}
    heads, width = count(config, "transformer-heads"), config.integer("dim-emb")
    if width < 4 or width % 2 or width % heads:
        raise ImportFailedError(
            f"{source}: dim-emb must be even, at least 4 and divisible by the {heads} heads, got {width}; "
            "download the model again"
        )
    sizes, is_shared = config.get("dim-vocabs"), "Wemb" in tensors
    is_valid = isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    if not is_valid or (is_shared and sizes[0] != sizes[1]):
        raise ImportFailedError(
            f"{source}: dim-vocabs must be a list of two positive integers, the sizes of the source and the target "
            f"vocabulary, which are equal if both share the table 'Wemb', got {sizes!r}; download the model again"
        )
    inner = config.integer("transformer-dim-ffn")
    inners = {"encoder": inner, "decoder": config.integer("transformer-decoder-dim-ffn", 0) or inner}
    guided_layer = _guided_layer(config, layers["decoder"])
    config.check_all_read()
    attention = Attention(heads, heads, width // heads, (width // heads) ** -0.5)

    def stack(name: str) -> Stack:
        return Stack(
            width,
            Norm("layer", 1e-6),  # as in src/models/transformer.h of Marian
            "post",
            (attention,) * layers[name],
            FeedForward("relu", inners[name]),
            TokenEmbedding(math.sqrt(width), has_positions=True),
            cross=attention if name == "decoder" else None,
            cell="ssru" if name == "decoder" else "attention",
        )

    model = Description(
        "firefox",
        sizes[1] + 1,  # the start token is added
        MAX_POSITIONS if max_tokens is None else min(max_tokens, MAX_POSITIONS),
        stack("encoder"),
        stack("decoder"),
        source_vocabulary=None if is_shared else sizes[0],
        guided_alignment=("writes", guided_layer, 0),  # Marian trains the first head of a layer
    )
    weights = Weights(tensors, _modules(model, is_shared=is_shared))
    check_shapes(model, weights, f"{CONFIG} of {file}")
    return model, weights


def _guided_layer(config: Config, layers: int) -> int:
    """Return the index of the decoder layer that was trained on word alignments.

    The option is "last", or the number of a layer, starting with 1.
    """
    key = "transformer-guided-alignment-layer"
    return (layers if config.get(key, "last") == "last" else config.integer(key, least=1, most=layers)) - 1


def _modules(model: Description, *, is_shared: bool) -> Mapping[str, Source]:
    """Return the tensors of Marian; it stores matrices as (inputs, outputs) and vectors as rows."""
    # The decoder starts with a zero vector, which is the embedding of the added start token.
    target = AdaptedModule("Wemb" if is_shared else "decoder_Wemb", added=(0.0,))
    modules: dict[str, Source] = {"embedding.weight": target}
    if not is_shared:
        modules = {"encoder.embedding.weight": "encoder_Wemb", "decoder.embedding.weight": target}
    modules["output.bias"] = AdaptedModule("decoder_ff_logit_out_b", added=(_NEVER,), is_row=True)
    for name, stack in (("encoder", model.encoder_stack), ("decoder", model.decoder_stack)):
        modules[f"{name}.positions"] = partial(timescale_sinusoids, model.max_positions, stack.width)
        for number in range(stack.layers):
            for short, long in _LAYER_TENSORS[name].items():
                is_matrix = _MATRIX.fullmatch(short) is not None
                part = AdaptedModule(f"{name}_l{number + 1}_{short}", transposed=is_matrix, is_row=not is_matrix)
                modules[f"{name}.{number}.{long}"] = part
    return modules


def generation(model: Description, unknown_id: int | None = 1) -> GenerationSettings:
    """Return the special tokens, and settings for greedy search without unknown tokens."""
    start_id = model.vocabulary - 1
    suppressed = (start_id,) if unknown_id is None else (unknown_id, start_id)
    defaults = GenerationDefaults(suppress_tokens=suppressed, num_beams=1)
    # Padding of a source needs a token of the source vocabulary, which may be the smaller one.
    return GenerationSettings(pad_id=END_ID, start_ids=(start_id,), end_ids=(END_ID,), defaults=defaults)
