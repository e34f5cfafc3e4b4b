"""The bundle: a folder with `manifest.json`, ONNX graphs, one file of weights and tokenizers.

`export` writes it and `service` reads it; nothing else passes between them. This module is the schema and the
reader. It imports nothing of the rest of the service.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.external_data import ExternalTensor, are_finite, external_tensors

SCHEMA_VERSION = 3
MANIFEST = "manifest.json"
MAX_BEAMS = 8
# K, how many candidates the step returns where the vocabulary has as many: beam search looks at twice as many as it has
# beams, and may have to leave the end token out.
TOP_TOKENS = 2 * MAX_BEAMS + 1

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Task = Literal["generate", "encode", "attention", "classify", "similar"]


class BundleError(Exception):
    """A bundle that cannot be served; the message says why and what would help."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(_Part):
    """What a file must be to be read."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: int


class Tokens(_Part):
    """Ids with a meaning for the engine."""

    pad_id: int
    start_id: int  # what the decoder reads before its first token
    end_id: int


class Limits(_Part):
    """Largest sizes, special tokens included."""

    max_source_tokens: int
    max_target_tokens: int  # slots of the state that grows with the target
    vocabulary: int


class Graph(_Part):
    """One ONNX graph and which of the names that the engine knows it takes and gives.

    The encoder takes `source_ids` (B, S) int64 and `source_lengths` (B,) int32; it gives `hidden` (B, S, M), what fills
    the states, its attention maps and, of a classifier, `label_logprobs` (B, C). The step takes, of one token a row,
    `token_ids` (B,) int64, `lengths` (B,) int32 (target tokens read before this one) and `source_lengths` (B,) int32,
    and the states; it gives `logits` and `logprobs` (B, V), the best of these as `top_logprobs` and `top_ids` (B, K) in
    falling order, the states that change, and its attention maps. What compares tokens takes `token_ids` (N,) int64 and
    gives `cosines` (N, V). Batch, source and target axes are free, and so is N.
    """

    file: Name
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class State(_Part):
    """A tensor that the decoder keeps for each row between two steps.

    `shape` is that of one row; the strings "source" and "target" stand for the axis that grows. A state that grows with
    the target is written by the step into the same memory that it reads.
    """

    input: str  # its name among the step's inputs
    output: str | None = None  # its name among the step's outputs; None where a step never changes it
    fill: Literal["encoder", "zeros"]
    encoder_output: str | None = None  # what fills it, where `fill` is "encoder"
    shape: tuple[int | Literal["source", "target"], ...]
    dtype: Literal["float32", "float16"] = "float32"

    @model_validator(mode="after")
    def _filled_by_something(self) -> "State":
        if (self.fill == "encoder") != (self.encoder_output is not None):
            raise ValueError("encoder_output must be given exactly where fill is 'encoder'")
        return self


class Window(_Part):
    """What a row of a map looks at: the columns from p - radius to p + radius. All others are 0."""

    # p is the row's own number, from 0 and at most the last column's; or what the decoder computes.
    centre: Literal["monotonic", "predicted"]
    radius: int


class Attention(_Part):
    """Attention maps of one kind.

    An `encoder` map is source x source, one graph output a layer, (B, heads, S, S). So is an `encoder_slots` map, but
    its columns are no tokens: a fixed number of slots, each made of all of the source. `cross` and `decoder` maps come
    from the step, one row a call: each output is (B, heads, N, columns) with N layers, and there may be several, one
    after another; columns are the source's tokens, or the decoder's inputs so far. Entries beyond a row's own length
    mean nothing.
    """

    kind: Literal["encoder", "encoder_slots", "cross", "decoder"]
    outputs: tuple[str, ...]
    layers: int
    heads: int
    columns: int | None = None  # of `encoder_slots`, whose columns are no tokens
    window: Window | None = None  # None where a row looks at every column
    normalized: bool = True  # whether rows sum to 1

    @model_validator(mode="after")
    def _has_columns_of_its_own(self) -> "Attention":
        if (self.kind == "encoder_slots") != (self.columns is not None):
            raise ValueError("columns must be given exactly where kind is 'encoder_slots'")
        return self


class Languages(_Part):
    """What a translation is from and to, as ISO 639-1 codes."""

    source: Annotated[str, Field(pattern=r"^[a-z]{2}$")]
    target: Annotated[str, Field(pattern=r"^[a-z]{2}$")]


class ChatTemplate(_Part):
    """How a dialogue is written as one text: `user` and `assistant` around each message, `reply` at the end."""

    user: Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$")]  # {} stands for the message
    assistant: Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$")]
    reply: str  # what the model goes on from


class Verification(_Part):
    """Differences between ONNX Runtime and PyTorch, measured by the export on the project's sentences."""

    sentences: int
    tolerance: float  # the largest difference of logits, or of labels' log-probabilities, that was allowed
    max_logit_difference: float
    max_attention_difference: float
    different_generations: int  # greedy outputs that differ though no two candidates were close
    close_generations: int  # greedy outputs that part where the two best candidates lie within rounding


class Bleu(_Part):
    """Corpus BLEU in percent of one way of decoding, with float32 weights and with quantised ones."""

    num_beams: int
    float32: float
    quantized: float


class Quality(_Part):
    """What quantisation cost on parallel text."""

    split: str
    sentences: int
    signature: str  # sacreBLEU's, of how BLEU was made
    bleu: tuple[Bleu, ...]


Site = Literal["encoder", "layers", "projection"]  # of the encoder, of the step's layers, to the vocabulary
Form = Literal["blocks", "rows", "static", "float32"]  # see `export.quantize`


class Quantization(_Part):
    """How the weights were quantised."""

    bits: Literal[4, 8, 16]
    block_size: int | None  # weights that share a scale; None where each has its own, as in float16
    forms: dict[Site, Form]  # of products; empty where all are float16
    float32_digest: str  # `Manifest.digest` of the bundle that was quantised
    quality: Quality | None  # None where nobody measured it: good for measuring time alone


class Manifest(_Part):
    """`manifest.json`, whole."""

    schema_version: int
    name: Name
    architecture: str  # for people: the service decides nothing by it
    description: str
    license: str
    created: int  # seconds since 1970
    dtype: Literal["float32", "float16", "int8", "int4"]
    tasks: tuple[Task, ...]
    parameters: int
    half_weights: bool = False  # whether matrices were rounded to float16, and are stored so, before all else
    source_tokenizer: Name
    target_tokenizer: Name
    tokens: Tokens
    begins_with: Literal["start_token", "source"] = "start_token"  # what the decoder reads before it writes
    limits: Limits
    encoder: Graph
    step: Graph | None  # None where nothing is generated
    rows: Graph | None = None  # moves rows of states that NumPy cannot reach; only float16 bundles have it
    similar: Graph | None = None  # compares tokens by their embeddings
    states: tuple[State, ...]
    attention: tuple[Attention, ...]
    labels: tuple[str, ...] = ()  # what `label_logprobs` stand for
    languages: Languages | None = None  # of a model that translates
    chat: ChatTemplate | None = None  # of a model that converses
    verification: Verification | None  # of a float32 bundle; quantised graphs are meant to differ
    quantization: Quantization | None = None
    files: dict[Name, FileRecord]

    @property
    def digest(self) -> str:
        """SHA-256 over the files' own: two bundles that answer alike have the same."""
        lines = "".join(f"{record.sha256}  {name}\n" for name, record in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    @model_validator(mode="after")
    def _can_do_its_tasks(self) -> "Manifest":
        for task, can_do in (
            ("generate", self.step is not None),
            ("classify", "label_logprobs" in self.encoder.outputs),
            ("classify", bool(self.labels)),
            ("similar", self.similar is not None),
        ):
            if (task in self.tasks) != can_do:
                raise ValueError(f"the task {task} and what it needs must be given together")
        if self.languages and "generate" not in self.tasks:
            raise ValueError("languages are of a model that generates")
        return self

    @property
    def decoder(self) -> Graph:
        """The step of a model that generates."""
        assert self.step is not None, "only what generates has a step"
        return self.step

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All graphs that the bundle has."""
        return tuple(graph for graph in (self.encoder, self.step, self.rows, self.similar) if graph is not None)

    @property
    def goes_on(self) -> bool:
        """Whether the model goes on with its source, instead of answering it."""
        return self.begins_with == "source"

    def beginning(self, source_ids: Sequence[int]) -> tuple[int, ...]:
        """What the decoder reads before it writes.

        The step reads the last of it first, the states hold the rest: of a source the encoder fills them.
        """
        return tuple(source_ids) if self.goes_on else (self.tokens.start_id,)

    def room(self, source_tokens: int) -> int:
        """The most target tokens after a source of so many; the last takes no slot, since nothing reads it."""
        return self.limits.max_target_tokens - (source_tokens - 1 if self.goes_on else 0)

    def attention_of(self, kind: str) -> Attention:
        """Raises KeyError where the model has no maps of that kind."""
        for attention in self.attention:
            if attention.kind == kind:
                return attention
        raise KeyError(kind)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a bundle without following a link and without waiting for the writer of a FIFO.

    Raises:
        BundleError: it cannot be opened, is not a regular file, or has a second link, through which somebody else could
            change it.
        FileNotFoundError: there is no such file.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise BundleError(f"{path} cannot be opened: {reason}; it must be a readable regular file") from None
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is not a regular file")
        if status.st_nlink != 1:
            raise BundleError(f"{path} has {status.st_nlink} links; a bundle's file must have one")
        yield file


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`; the files it names are not opened.

    Raises:
        BundleError: no manifest, not JSON, another schema version, or a field that does not fit.
    """
    path = folder / MANIFEST
    try:
        # JSON without a schema first: another version must be named before its fields are found wanting.
        with _open_regular(path) as file:
            document = json.loads(file.read().decode())
    except FileNotFoundError:
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema_version {version!r}, this service needs {SCHEMA_VERSION}; export it again"
        )
    try:
        return Manifest.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path}: {where}: {first['msg']}") from None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check every file that serving the bundle opens: its kind, its SHA-256, and that its weights are finite numbers.

    Those files are the ones that the manifest lists. A graph, a tokenizer or external data of a graph that it does not
    list is refused.

    Raises:
        BundleError: naming the first file that is not as it should be.
    """
    for name in (*(graph.file for graph in manifest.graphs), manifest.source_tokenizer, manifest.target_tokenizer):
        _check_listed(folder, manifest, name)
    for name, record in manifest.files.items():
        _check_file(folder / name, record)
    tensors = set[ExternalTensor]().union(*(_external_tensors(folder / graph.file) for graph in manifest.graphs))
    for name in sorted({tensor.file for tensor in tensors}):
        _check_listed(folder, manifest, name)
        _check_finite(folder / name, [tensor for tensor in tensors if tensor.file == name])


def _check_listed(folder: Path, manifest: Manifest, name: str) -> None:
    if name not in manifest.files:
        raise BundleError(f"{folder / MANIFEST} does not list {name!r}, which the bundle uses; export the bundle again")


def _check_file(path: Path, record: FileRecord) -> None:
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            is_same = size == record.bytes and hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from None
    if not is_same:
        raise BundleError(f"{path} is not the file that the manifest describes: its SHA-256 differs")


def _external_tensors(path: Path) -> set[ExternalTensor]:
    try:
        with _open_regular(path) as file:
            return external_tensors(file.read())
    except ValueError as error:
        raise BundleError(f"{path} cannot be used: {error}") from None


def _check_finite(path: Path, tensors: Sequence[ExternalTensor]) -> None:
    try:
        is_well = are_finite(path, tensors)
    except ValueError as error:
        raise BundleError(f"{path} cannot be used: {error}") from None
    if not is_well:
        raise BundleError(f"{path} has weights that are not finite numbers (NaN or infinity); export the bundle again")


def read_bundle(folder: Path) -> Manifest:
    """`read_manifest`, then `check_files`."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """The `files` of a manifest to be written."""
    return {name: FileRecord(sha256=sha256_of(folder / name), bytes=(folder / name).stat().st_size) for name in names}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
