"""Sizes of a Firefox translation model, and the check that it is of the supported architecture."""

from collections.abc import Mapping
from dataclasses import dataclass

from export.errors import ImportFailedError
from export.firefox.marian_binary import ConfigValue, MarianModel

# Values of options that the equations in `export.firefox.reference` assume. The configuration must
# have the first ones. Others can be missing, since they are newer than some models.
REQUIRED: Mapping[str, ConfigValue] = {
    "type": "transformer",
    "transformer-decoder-autoreg": "rnn",
    "dec-cell": "ssru",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",  # dropout (not in inference), addition, normalization
    "transformer-ffn-activation": "relu",
}
NEUTRAL: Mapping[str, tuple[ConfigValue, ...]] = {
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
# Options of other architectures, of training, or that follow from the tensors.
_IGNORED = (
    "bert-train-type-embeddings bert-type-vocab-size dec-cell-high-depth dim-emb dim-rnn dim-vocabs enc-cell "
    "enc-cell-depth enc-type factors-combine factors-dim-emb layer-normalization skip special-vocab tied-embeddings "
    "tied-embeddings-all tied-embeddings-src transformer-aan-activation transformer-aan-depth transformer-aan-nogate "
    "transformer-decoder-dim-ffn transformer-depth-scaling transformer-dim-aan transformer-dim-ffn "
    "transformer-guided-alignment-layer ulr-dim-emb ulr-trainable-transformation version"
)
IGNORED = frozenset(_IGNORED.split())
ATTENTION = [f"{kind}{part}" for part in "qkvo" for kind in "Wb"]
FEED_FORWARD = ["W1", "b1", "W2", "b2", "ffn_ln_scale", "ffn_ln_bias"]
NORM = ["Wo_ln_scale", "Wo_ln_bias"]
RECURRENT = ["W", "Wf", "bf", "ffn_ln_scale", "ffn_ln_bias"]


@dataclass(frozen=True)
class FirefoxDescription:
    """Sizes and the names of the embeddings."""

    encoder_layers: int
    decoder_layers: int
    heads: int
    width: int
    source_embedding: str  # name of a tensor (V, width)
    target_embedding: str  # the same if both languages share a vocabulary
    source_vocabulary: int
    target_vocabulary: int


def describe_firefox(model: MarianModel) -> FirefoxDescription:
    """Check a model and return its sizes.

    Raises:
        ImportFailedError: an option has another value than the supported one or is unknown, or a
            tensor is missing, is unknown or has another shape.
    """
    for key, expected in REQUIRED.items():
        if model.config.get(key) != expected:
            raise _error(f"the option {key} must be {expected!r}, got {model.config.get(key)!r}")
    for key, values in NEUTRAL.items():
        found = model.config.get(key, values[0])
        if found not in values:
            raise _error(f"the option {key} must be {values[0]!r}, got {found!r}")
    counted = ("enc-depth", "dec-depth", "transformer-heads")
    unknown = model.config.keys() - REQUIRED.keys() - NEUTRAL.keys() - IGNORED - set(counted)
    if unknown:
        raise _error(f"the option {min(unknown)} is not known and may change the outputs")
    encoder_layers, decoder_layers, heads = (_count(model.config, key) for key in counted)
    shared = "Wemb" in model.names
    source, target = ("Wemb", "Wemb") if shared else ("encoder_Wemb", "decoder_Wemb")
    expected_names = {source, target, "decoder_ff_logit_out_b"}
    for layer in range(1, encoder_layers + 1):
        expected_names |= {f"encoder_l{layer}_self_{part}" for part in ATTENTION + NORM}
        expected_names |= {f"encoder_l{layer}_ffn_{part}" for part in FEED_FORWARD}
    for layer in range(1, decoder_layers + 1):
        expected_names |= {f"decoder_l{layer}_rnn_{part}" for part in RECURRENT}
        expected_names |= {f"decoder_l{layer}_context_{part}" for part in ATTENTION + NORM}
        expected_names |= {f"decoder_l{layer}_ffn_{part}" for part in FEED_FORWARD}
    missing, others = expected_names - set(model.names), set(model.names) - expected_names
    if missing or others:
        raise _error(f"it lacks the tensor {min(missing)}" if missing else f"the tensor {min(others)} is not known")
    width = model.shape(source)[-1]
    if width % 2 or width < 4 or width % heads:
        raise _error(f"its width must be even, at least 4 and divisible by its {heads} heads, got {width}")
    _check_shapes(model, encoder_layers, decoder_layers, width, target)
    return FirefoxDescription(
        encoder_layers, decoder_layers, heads, width, source, target, model.shape(source)[0], model.shape(target)[0]
    )


def _check_shapes(model: MarianModel, encoder_layers: int, decoder_layers: int, width: int, target: str) -> None:
    blocks = [f"encoder_l{layer}" for layer in range(1, encoder_layers + 1)]
    blocks += [f"decoder_l{layer}" for layer in range(1, decoder_layers + 1)]
    inner = {name: model.shape(f"{name}_ffn_W1")[-1] for name in blocks}
    vocabulary = model.shape(target)[0]
    for name in model.names:
        block = "_".join(name.split("_")[:2])
        if name.endswith("Wemb"):
            expected = (model.shape(name)[0], width)
        elif name == "decoder_ff_logit_out_b":
            expected = (1, vocabulary)
        elif name.endswith("_W1"):
            expected = (width, inner[block])
        elif name.endswith("_W2"):
            expected = (inner[block], width)
        elif name.endswith("_b1"):
            expected = (1, inner[block])
        else:
            is_matrix = name.split("_")[-1].startswith("W")
            expected = (width, width) if is_matrix else (1, width)
        if model.shape(name) != expected:
            raise _error(f"the tensor {name} must have the shape {expected}, got {model.shape(name)}")


def _count(config: Mapping[str, ConfigValue], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1000:
        raise _error(f"the option {key} must be an integer from 1 to 1000, got {value!r}")
    return value


def _error(reason: str) -> ImportFailedError:
    return ImportFailedError(f"the Marian model is not a supported translation model of Firefox: {reason}")
