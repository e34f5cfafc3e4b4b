"""Options of the commands, and their limits. This module needs neither ONNX nor PyTorch."""

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from sightline.base.bundle import (
    BundleError,
    ChatTemplate,
    Languages,
    LayerGroup,
    QuantScheme,
    TrainingUnit,
    read_manifest,
)
from sightline.base.errors import UsageError

DEFAULT_SENTENCES = Path(__file__).resolve().parents[1] / "loadtest" / "sentences.txt"

# Allowed block sizes by bits. With larger blocks, ONNX Runtime rounds a single row of activations
# differently than several rows: with 8 bits from 128 and with 4 bits from 64 if the processor has
# AVX-512 VNNI, and with 4 bits from 32 if it only has AVX2. The next product rounds to int8, which
# turns the difference into up to 0.1 in a score, so that a text would depend on the size of its
# batch.
BLOCK_SIZES = {8: (16, 32, 64), 4: (16,)}
BLOCK_SIZE = {8: 32, 4: 16}  # default block sizes by bits
# Default scheme of the encoder by bits. An encoder reads many tokens at once, for which products of
# `per-token` are about twice as fast as those of `group-wise`, but they always have 8 bits.
ENCODER_SCHEME: dict[int, QuantScheme] = {8: "per-token", 4: "group-wise"}
FLOAT32_BITS = 32
StateType = Literal["int8", "float32"]

MAX_LOSS = 0.3  # largest accepted loss of BLEU; two training runs differ by as much
# Limits of the loss on plain text, see `sightline.export.convert.text_quality`.
MIN_COSINE = 0.99  # of the embeddings, mean of the texts
MIN_SAME_LABELS = 0.98  # share of equal best labels
MAX_SCORE_DIFFERENCE = 0.1  # of the probability that a model with a single label returns
MAX_DIVERGENCE = 0.05  # mean Kullback-Leibler divergence of predicted tokens, in nats
MIN_SAME_FIRST = 0.9  # share of equal most probable tokens
MIN_CHRF = 95.0  # chrF against any reference then falls by at most about 5
MIN_PAIRS = 1000  # with fewer pairs, chance often changes a difference of BLEU by more than `MAX_LOSS`


@dataclass(frozen=True)
class BundleMetadata:
    """Descriptive fields of a manifest."""

    name: str  # name of the model in requests
    description: str = ""
    license: str = ""  # license of the weights
    languages: Languages | None = None
    chat: ChatTemplate | None = None  # None for the format of the training dialogues
    training_unit: TrainingUnit | None = None  # None for that of the family, or of the task of a training run
    lazy: bool = False  # True if the service loads the model on its first use

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.name):
            raise UsageError(
                f"name must be 1 to 128 letters, digits, '.', '_' or '-' and begin with a letter or digit, got "
                f"{self.name!r}"
            )


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export that change the graphs, the limits or the check."""

    max_tokens: int | None = None  # lower limit of positions than the checkpoint's; T5 can have a higher one
    task: str | None = None  # a task that the model must be able to do
    shortlist: bool = False  # restrict a Firefox model to its shortlist
    half_weights: bool = False  # round matrices of a training run to float16; computation stays float32
    sentences: tuple[str, ...] = ()  # source sentences for the check of a training run
    tolerance: float | None = None  # largest difference from the reference; None: derived from float32 rounding


@dataclass(frozen=True)
class Recipe:
    """Quantization scheme of each group of layers."""

    bits: Literal[4, 8]  # bits of group-wise quantized products and of embedding tables
    block_size: int = 0  # weights of a layer that share a scale; 0 means the default `BLOCK_SIZE`
    encoder: QuantScheme | None = None  # None means the default `ENCODER_SCHEME`
    layers: QuantScheme = "group-wise"  # layers of the decoder
    projection: QuantScheme = "group-wise"  # output projection
    states: StateType = "int8"  # keys and values of the decoder, see `sightline.export.convert.states`

    @property
    def schemes(self) -> dict[LayerGroup, QuantScheme]:
        return {
            "encoder": self.encoder or ENCODER_SCHEME[self.bits],
            "layers": self.layers,
            "projection": self.projection,
        }

    def __post_init__(self) -> None:
        if self.bits not in BLOCK_SIZES:
            raise UsageError(f"bits must be one of {tuple(BLOCK_SIZES)}, got {self.bits}")
        if not self.block_size:
            object.__setattr__(self, "block_size", BLOCK_SIZE[self.bits])
        if self.block_size not in BLOCK_SIZES[self.bits]:
            raise UsageError(
                f"block_size must be one of {BLOCK_SIZES[self.bits]} with {self.bits} bits, got {self.block_size}"
            )


def languages_of(codes: Sequence[str]) -> Languages:
    """Return the languages of a translation model from two BCP 47 tags, in their usual case.

    Raises:
        UsageError: a tag is not a language tag.
    """
    source, target = codes
    try:
        return Languages(sources=(_with_usual_case(source),), targets=(_with_usual_case(target),))
    except ValidationError:
        raise UsageError(
            f"languages must be BCP 47 tags such as en, de-CH or zh-Hans, got {source} and {target}"
        ) from None


def _with_usual_case(tag: str) -> str:
    """Return a BCP 47 tag as `de-Latn-CH`: lower case, scripts as titles, regions in upper case.

    Subtags after one of a single character are in lower case (RFC 5646, section 2.1.1).
    """
    first, *subtags = tag.lower().split("-")
    parts, is_extension = [first], len(first) == 1
    for subtag in subtags:
        is_extension |= len(subtag) == 1
        change = {2: str.upper, 4: str.title}.get(len(subtag), str) if not is_extension else str
        parts.append(change(subtag))
    return "-".join(parts)


def _existing_metadata(bundle: Path, name: str) -> BundleMetadata:
    """Return the metadata of the existing bundle, or only the name if there is none."""
    try:
        manifest = read_manifest(bundle)
    except BundleError:
        return BundleMetadata(name)
    return BundleMetadata(name, manifest.description, manifest.license, manifest.languages, manifest.chat)


def metadata_of(arguments: argparse.Namespace, known: Mapping[str, Any] | None = None) -> BundleMetadata:
    """Return the metadata that options give, completed by those of the existing bundle.

    Args:
        arguments: options of the command.
        known: fields that the record of the training has. Options precede them, and they precede
            the existing bundle.
    """
    present = _existing_metadata(arguments.out, arguments.name or arguments.out.resolve().name)
    present = dataclasses.replace(present, **(known or {}))
    given: dict[str, Any] = {name: getattr(arguments, name) for name in ("description", "license")}
    given["training_unit"] = arguments.unit
    given["languages"] = languages_of(arguments.languages) if arguments.languages else None
    return dataclasses.replace(present, **{name: value for name, value in given.items() if value is not None})
