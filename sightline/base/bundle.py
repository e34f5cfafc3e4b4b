"""Schema of bundles: folders with a manifest, ONNX graphs, weights and tokenizers.

`export` writes bundles and `service` reads them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sightline.base.errors import CommandError, UsageError

SCHEMA_VERSION = 5
MANIFEST = "manifest.json"
MAX_BEAMS = 8
# K: the number of top tokens that the decoder graph returns, if the vocabulary is that large. Beam
# search considers twice as many candidates as it has beams, and may have to skip the end token.
# With more end tokens or suppressed tokens, it may need all scores.
TOP_TOKENS = 2 * MAX_BEAMS + 1
TOP_OUTPUTS = frozenset({"top_ids", "top_logprobs"})  # of a decoder graph, needed for every row
VOCABULARY_OUTPUTS = frozenset({"logits", "logprobs"})  # of a decoder graph, over the whole vocabulary
PREFILL_TOKENS = 32  # of a chunk of a prompt, for a decoder-only model; the last may have half as many more

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Task = Literal["generate", "encode", "attention", "classify", "rerank", "tag", "answer", "fill-mask", "sparse"]
MapKind = Literal["encoder", "encoder_slots", "cross", "decoder"]  # see `AttentionMaps`
LabelKind = Literal["classes", "independent", "score", "tokens", "span"]  # see `Manifest.label_kind`
VectorPooling = Literal["mean", "first", "last", "max"]
# Unit of the texts that an encoder-decoder model was trained on.
TrainingUnit = Literal["sentence", "text"]


class BundleError(CommandError):
    """A bundle cannot be served. The message states the reason and the remedy."""


class MissingBundleError(BundleError, UsageError):
    """A setting or an argument names a folder or a model that does not exist."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(_Part):
    """Size and SHA-256 that a file must have."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: int


class Tokens(_Part):
    """Token ids with a special meaning."""

    pad_id: int
    # First inputs of the decoder, unless the model is decoder-only.
    start_ids: Annotated[tuple[int, ...], Field(min_length=1)]
    end_ids: Annotated[tuple[int, ...], Field(min_length=1)]  # each of them ends a sequence
    mask_id: int | None = None  # stands for a token that a masked language model predicts

    @property
    def end_id(self) -> int:
        """The first end token, which a sequence of maximum length is forced to end with."""
        return self.end_ids[0]


class Limits(_Part):
    """Maximum sizes in tokens, special tokens included."""

    max_source_tokens: int
    max_target_tokens: int  # positions of a state that grows with the target
    vocabulary: int
    source_vocabulary: int | None = None  # None: sources have the same vocabulary


class Graph(_Part):
    """One ONNX graph with the names of its inputs and outputs.

    The encoder graph reads `source_ids` (B, S) int64 and `source_lengths` (B,) int32. It returns
    `hidden` (B, S, M), the initial values of decoder states, and attention maps. Models with labels
    return one more output, see `Manifest.label_kind`: `label_logprobs` (B, C) for "classes",
    `label_logits` (B, C) for "independent" and "score", `token_label_logprobs` (B, S, C) for
    "tokens", `span_logits` (B, S, 2) of the first and the last token of an answer for "span".
    Models of the kind "classes" with a label of entailment return `label_logits`, too.

    The decoder graph of an encoder-decoder model processes one token for each row of the batch. It
    reads `token_ids` (B,) int64, `lengths` (B,) int32 (number of target tokens read before this
    one), `source_lengths` (B,) int32 and the states. It returns `logits` and `logprobs` (B, V), the
    K best of them as `top_logprobs` and `top_ids` (B, K) in descending order, the updated states,
    and attention maps.

    The decoder graph of a decoder-only model also computes prompts. It takes `token_ids` (B, S)
    int64, `lengths` (B,) int32 (number of tokens in the cache of each row), `scored` (B,) bool and
    the states. It is called with one token for each row, or with several tokens of one row. It
    returns `hidden` (B, S, M) after the final normalization, the updated states, attention maps,
    and the scores of the next token as above, only for the rows that `scored` marks.

    The `predict` graph reads rows of `hidden` (N, M) and returns the `logits` (N, V) of the tokens
    there.

    The `contributions` graph reads `source_ids` (1, S), `target_ids` (1, T), the inputs of the
    decoder, and `zeroed_tokens` (1,), all int64. It returns an output for each method and kind of
    attention, whose rows N attend to columns K: `norms.KIND` (L, H, N, K), and, before rows are
    divided by their sums, `value_zeroing.KIND` (L, K, N), of the first `zeroed_tokens` columns, and
    `alti.KIND` (L, K, N). `alti.cross` ends with one more column, for what the layer adds to.

    The batch, source and target axes and N are dynamic.
    """

    file: Name
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class State(_Part):
    """A tensor of decoder state that is kept for each row between decoder steps.

    `shape` is the shape of one row. The strings "source" and "target" mark an axis whose size is
    the number of source or target tokens. A state with a "target" axis, such as a KV cache, is
    updated in place: the decoder graph writes to the memory that it reads.

    States of type int8 hold codes, whose scales are in the graphs. Their operator needs the memory
    of each state as output too, even if it never changes the state.
    """

    input: str  # name of the input of the decoder graph
    output: str | None = None  # name of the output; None only if decoder steps never change the state
    init: Literal["encoder", "zeros"]  # initial value
    encoder_output: str | None = None  # encoder output with the initial value, if `init` is "encoder"
    shape: tuple[int | Literal["source", "target"], ...]
    dtype: Literal["float32", "float16", "int8", "int32"] = "float32"

    @model_validator(mode="after")
    def _check_initial_value(self) -> "State":
        if (self.init == "encoder") != (self.encoder_output is not None):
            raise ValueError("encoder_output is required if init is 'encoder', and not allowed otherwise")
        return self

    @property
    def is_changed(self) -> bool:
        """True if decoder steps change the state. Keys and values of the source never change."""
        return self.output is not None and "source" not in self.shape

    @property
    def has_fixed_size(self) -> bool:
        return all(isinstance(axis, int) for axis in self.shape)

    def row_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of one row for given sizes of the source and target axes."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.shape)


class Window(_Part):
    """Columns that a row of an attention map can attend to: p - radius to p + radius."""

    # "monotonic": p is the index of the row, at most that of the last column.
    # "predicted": the decoder computes p (Luong et al. 2015, section 3.2).
    centre: Literal["monotonic", "predicted"]
    radius: int


class AttentionMaps(_Part):
    """Attention maps of one kind.

    - `encoder`: self-attention of the encoder. One graph output for each layer, (B, heads, S, S).
    - `encoder_slots`: attention of a Linformer encoder, (B, heads, S, columns). The columns are not
      tokens but projected keys: a fixed number of mixtures of all source tokens.
    - `cross` and `decoder`: outputs of the decoder graph, which returns one row of the map in each
      step. Each output is (B, heads, N, columns) for N layers, or (B, heads, N, S, columns) for the
      S new tokens of a decoder-only model; several outputs are concatenated along the layers. The
      columns are the source tokens, or the decoder's inputs so far.

    Columns beyond the length of a sequence are undefined.
    """

    kind: MapKind
    outputs: tuple[str, ...]
    layers: int
    heads: int
    columns: int | None = None  # number of projected keys; only for `encoder_slots`
    window: Window | None = None  # None if a row can attend to all columns
    normalized: bool = True  # True if each row sums to 1
    by_position: bool = False  # True if weights depend on the index of the column (location score)

    @model_validator(mode="after")
    def _check_columns(self) -> "AttentionMaps":
        if (self.kind == "encoder_slots") != (self.columns is not None):
            raise ValueError("columns is required if kind is 'encoder_slots', and not allowed otherwise")
        return self


# The decoder step whose cross-attention belongs to a target token: the step that writes it, or the
# next one, which reads it.
AlignmentStep = Literal["writes", "reads"]
ALIGNMENT_STEPS: tuple[AlignmentStep, ...] = get_args(AlignmentStep)


class Alignment(_Part):
    """Cross-attention heads whose mean weights align target words with source words.

    They are chosen at export, see `sightline.export.check.alignment`.
    """

    step: AlignmentStep = "writes"  # decoder step of a target token: the one that writes it, or that reads it
    layer: Annotated[int, Field(ge=0)]
    heads: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    criterion: str  # measure by which they were chosen, such as "prediction_difference"
    agreement: float  # share of target words whose link is that of the criterion, 0 to 1
    baseline: float  # the same share for the mean of all heads of the last layer
    sentences: int  # number of source sentences that were translated for the choice


MIN_COVERAGE_AUROC = 0.85  # of a head that marks words


class Coverage(_Part):
    """Cross-attention head that shows which source words a translation omits.

    The coverage of a word is the largest weight that it gets in any decoder step. The head is
    chosen at export, see `sightline.export.check.coverage`: words are inserted into sources of
    which the model keeps its translation, which thus omits them.
    """

    layer: Annotated[int, Field(ge=0)]
    head: Annotated[int, Field(ge=0)]
    auroc: float  # probability that an inserted word has a smaller coverage than another word
    insertions: int  # number of inserted words
    # Words with a smaller coverage count as omitted. None: the AUROC is too low to mark words.
    threshold: float | None = None
    recall: float = 0.0  # share of the inserted words that count as omitted
    # Share of the inserted words among those that count as omitted, in sources with an insertion.
    # It is lower in ordinary translations if the model omits fewer words.
    precision: float = 0.0
    marked: float = 0.0  # share of the words of unchanged sources that count as omitted
    # Words that often have no translation of their own, in lower case; they never count as omitted.
    untranslated: tuple[str, ...] = ()


# A language with any subtags, such as "en", "de-CH" or "zh-Hans", or a private tag: "x-elvish".
LanguageCode = Annotated[str, Field(pattern=r"^([a-z]{2,3}(-[A-Za-z0-9]{1,8})*|x(-[A-Za-z0-9]{1,8})+)$")]
PrefixIds = dict[LanguageCode, tuple[int, ...]]


class Languages(_Part):
    """Languages of a translation model as BCP 47 tags such as "en" or "zh-Hant".

    A multilingual model gets the languages as tokens: before the source, after its end token, or
    as the first tokens of the target, which are then forced. The first source and target language
    are the defaults.
    """

    sources: Annotated[tuple[LanguageCode, ...], Field(min_length=1)]
    targets: Annotated[tuple[LanguageCode, ...], Field(min_length=1)]
    source_prefix: PrefixIds = {}  # tokens before the source, by source language
    source_suffix: PrefixIds = {}  # tokens after the source and its end token, by source language
    source_prefix_of_target: PrefixIds = {}  # tokens before `source_prefix`, by target language
    target_prefix: PrefixIds = {}  # first tokens of the target, by target language

    @property
    def source(self) -> str:
        """The default source language."""
        return self.sources[0]

    @property
    def target(self) -> str:
        """The default target language."""
        return self.targets[0]


class ChatTemplate(_Part):
    """Program in Jinja that formats a dialogue as the text of a prompt, as Transformers renders it.

    `sightline.base.text.chat` renders it within limits. Special tokens in its texts are recognized
    by their names, those in messages are plain text.
    """

    program: str
    tool_program: str | None = None  # for dialogues with tools; None: `program`
    takes_tools: bool = False  # it writes definitions of tools
    tokens: dict[str, str] = {}  # names of special tokens by variables of the program, such as "bos_token"
    digest: str | None = None  # SHA-256 of the dialogues that the import rendered; None: not imported


class PairTemplate(_Part):
    """Template that formats a query and a document as the one text that a reranker reads.

    Special tokens in the template are recognized by their names, those in the query and the
    document are plain text. A special token or nothing follows the document.
    """

    text: str  # has {query} and {document} once, and {instruction} at most once
    instruction: str = ""  # task of the model, if a request has none

    @model_validator(mode="after")
    def _check_slots(self) -> "PairTemplate":
        counts = [self.text.count(f"{{{slot}}}") for slot in ("query", "document", "instruction")]
        if counts[:2] != [1, 1] or counts[2] > 1:
            raise ValueError("text must have {query} and {document} once, and {instruction} at most once")
        return self


class GenerationDefaults(_Part):
    """Generation settings that belong to a model.

    `suppress_tokens`, `bad_words` and `force_end` always apply. The others are used for parameters
    that a request omits, and have the limits of requests; None keeps the default of the service.
    """

    suppress_tokens: tuple[int, ...] = ()  # are never generated
    # Sequences of several tokens of which the last is never generated after the others.
    bad_words: tuple[Annotated[tuple[int, ...], Field(min_length=2)], ...] = ()
    force_end: bool = False  # the last token at the maximum length is the end token
    num_beams: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=65536)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=65536)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=65536)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(gt=0, le=10)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None


class Dense(_Part):
    """Linear layer of pooled vectors, as the module Dense of sentence-transformers.

    Its file has the weight (outputs, inputs) and, if there is one, the bias (outputs,) as
    little-endian float32.
    """

    file: Name
    inputs: int
    outputs: int
    has_bias: bool
    activation: Literal["identity", "tanh"]


class SentenceEmbedding(_Part):
    """Computation of one vector from the hidden states of a text."""

    pooling: VectorPooling
    dense: tuple[Dense, ...] = ()  # layers after pooling, in order
    normalize: bool  # scale vectors to Euclidean norm 1, after the layers
    # Texts put before an input, by name, for models trained with them: {"query": "query: "}.
    prompts: dict[str, str] = {}
    default_prompt: str | None = None  # name of the prompt of an input without one
    # Lengths to which vectors can be cut (Matryoshka); null for none, empty for any length.
    matryoshka: tuple[Annotated[int, Field(ge=1)], ...] | None = None


class Origin(_Part):
    """The checkpoint from which a bundle was imported."""

    kind: Literal["huggingface", "firefox"]
    family: str  # entry of the table of families, such as "bert"
    repository: str | None = None  # owner/name on a hub
    revision: str | None = None  # commit of the repository
    package: str | None = None  # NAME==VERSION of the package of the package index that held the files
    quantized: str | None = None  # encodings of the weights that were read, if they only approximate the model
    pickle: bool = False  # True if weights were read from a pickle
    ignored_keys: tuple[str, ...] = ()  # keys of config.json that were ignored because the user chose to
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]  # SHA-256 of everything that was read


class Verification(_Part):
    """Differences between ONNX Runtime and the reference, measured by the export.

    The reference is PyTorch for recurrent models, and a float64 implementation in NumPy for all
    others.
    """

    sentences: int
    longest: int | None = None  # tokens of the longest sentence; None if it was not recorded
    tolerance: float  # maximum accepted difference of logits or of the labels' log-probabilities
    max_logit_difference: float
    max_attention_difference: float
    different_generations: int  # greedy outputs that differ although no two candidates were close
    close_generations: int  # greedy outputs that differ where two candidates are within rounding error


class Bleu(_Part):
    """Corpus BLEU in percent for one beam width, before and after quantisation."""

    num_beams: int
    float32: float
    quantized: float


class Quality(_Part):
    """Quality on parallel text before and after quantisation."""

    split: str  # data split that was translated
    sentences: int
    signature: str  # signature of sacreBLEU
    bleu: tuple[Bleu, ...]


class LabelQuality(_Part):
    """Agreement of the labels of a quantised model with those of the float32 model."""

    labels: int  # number of labels of the model
    compared: int  # texts, or tokens of a model that labels tokens
    same_best: float  # share of them with the same best label, 0 to 1
    max_difference: float  # largest difference of the probability of a label


class EmbeddingQuality(_Part):
    """Agreement of the embeddings of a quantised encoder with those of the float32 model."""

    texts: int
    mean_cosine: float
    min_cosine: float
    labels: LabelQuality | None = None  # None if the model has no labels


class PredictionQuality(_Part):
    """Predictions of the tokens of texts by a decoder-only model before and after quantisation.

    `float32` and `quantized` are the perplexities of the texts.
    """

    texts: int
    predicted_tokens: int  # all tokens but the first of each text
    float32: float
    quantized: float
    # Mean Kullback-Leibler divergence from the predictions of float32, in nats; None if it was not
    # measured.
    mean_divergence: float | None = None
    same_first: float | None = None  # share of equal most probable tokens, 0 to 1


class AgreementQuality(_Part):
    """Agreement of greedy outputs of a quantised encoder-decoder with those of float32."""

    texts: int
    chrf: float  # corpus chrF2 in percent, with the outputs of the float32 model as references
    same_outputs: float  # share of texts with the same output tokens, 0 to 1


TextQuality = EmbeddingQuality | PredictionQuality | AgreementQuality

# The encoder, the decoder's layers, and the projection to the vocabulary.
LayerGroup = Literal["encoder", "layers", "projection"]
# Scales of "per-token" are dynamic, those of "per-tensor" static. See
# `sightline.export.convert.quantize`.
QuantScheme = Literal["group-wise", "per-token", "per-tensor", "float32"]


class Quantization(_Part):
    """Quantisation of the weights."""

    bits: Literal[4, 8, 16]
    block_size: int | None  # number of weights that share a scale; None for float16, or for a row or column
    schemes: dict[LayerGroup, QuantScheme]  # empty if all matrices are float16, or stored in 8 bits
    float32_digest: str  # `Manifest.digest` of the bundle that was quantised
    quality: Quality | TextQuality | None  # None if it was not measured


class Shortlist(_Part):
    """Restriction of translations to the tokens that their source makes likely.

    The states of the model hold these candidates. The decoder graph has one more input,
    `whole_vocabulary` (B,) bool: True for rows that are scored over the whole vocabulary. The
    others get the top tokens of their candidates, with log-probabilities relative to these, and
    have no `logits` and `logprobs`. If no row is True, these outputs have no rows.
    """

    size: int  # largest number of candidates; a source with more of them has the whole vocabulary
    quality: AgreementQuality | None = None  # with the outputs of the bundle without the shortlist


# Encoder output with the scores of labels, by `Manifest.label_kind`.
LABEL_OUTPUTS = {
    "classes": "label_logprobs",
    "independent": "label_logits",
    "score": "label_logits",
    "tokens": "token_label_logprobs",
    "span": "span_logits",
}
TOKEN_LABEL_KINDS = ("tokens", "span")  # kinds whose output has scores for each token
LABEL_LOGITS = LABEL_OUTPUTS["independent"]


def is_entailment(label: str) -> bool:
    """Return True for the name of the label of entailment, as Transformers recognizes it."""
    return label.lower().startswith("entail")


class Manifest(_Part):
    """Content of `manifest.json`."""

    schema_version: int
    name: Name
    architecture: str  # informative: nothing in the service depends on it
    description: str
    license: str
    created: int  # Unix time in seconds
    dtype: Literal["float32", "float16", "int8", "int4"]
    ops: Literal["contrib"] = "contrib"  # operators of the graphs: those of ONNX and of ONNX Runtime
    # True: loaded on the first use, like models of the setting `lazy_models`, and never the default
    # of a task unless the setting `default_model` names it.
    lazy: bool = False
    tasks: tuple[Task, ...]
    parameters: int
    half_weights: bool = False  # True if matrices were rounded to float16 before any quantisation
    source_tokenizer: Name
    target_tokenizer: Name
    tokens: Tokens
    decoder_start: Literal["start_token", "source"] = "start_token"  # first input of the decoder
    limits: Limits
    encoder: Graph | None  # None for decoder-only models
    decoder: Graph | None  # None if the model does not generate text
    rows: Graph | None = None  # copies rows of states in device memory; only in float16 bundles
    predict: Graph | None = None  # predicts tokens; only of masked language models
    contributions: Graph | None = Field(default=None, exclude_if=lambda graph: graph is None)  # measures contributions
    states: tuple[State, ...]
    attention: tuple[AttentionMaps, ...]
    alignment: Alignment | None = None  # None: not chosen, or there is no cross-attention
    coverage: Coverage | None = None  # None: not chosen, or there is no cross-attention
    labels: tuple[str, ...] = ()  # names in the order of the output with their scores
    # Output of the encoder graph: "classes" and "tokens" have log-probabilities, the others have
    # logits. See `Graph`.
    label_kind: LabelKind = "classes"
    languages: Languages | None = None  # only for translation models
    # Unit of the texts that the model was trained on. A model of sentences often leaves out a part
    # of a longer text, so its texts are split into sentences. Only encoder-decoder models can have
    # it.
    training_unit: TrainingUnit = "text"
    chat: ChatTemplate | None = None  # only for chat models
    pair_template: PairTemplate | None = None  # only for rerankers that are language models
    reads_pairs: bool = True  # False: calls with pairs of texts are refused
    generation: GenerationDefaults = GenerationDefaults()
    embedding: SentenceEmbedding | None = None  # None: mean pooling, not normalized
    origin: Origin | None = None  # None for models trained with this project
    verification: Verification | None  # only for float32 bundles: quantised graphs differ by design
    quantization: Quantization | None = None
    shortlist: Shortlist | None = None  # None: every token is possible in every translation
    files: dict[Name, FileRecord]

    @property
    def entailment(self) -> int | None:
        """Index of the label of entailment; None if the model has no zero-shot classification.

        Such a classification needs logits, which `label_logprobs` does not determine.
        """
        if self.encoder is None or LABEL_LOGITS not in self.encoder.outputs:
            return None
        indices = (index for index, label in enumerate(self.labels) if is_entailment(label))
        return next(indices, None) if len(self.labels) > 1 else None

    @property
    def digest(self) -> str:
        """SHA-256 over the names and hashes of all files in the bundle."""
        lines = "".join(f"{record.sha256}  {name}\n" for name, record in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    @model_validator(mode="after")
    def _check_tasks(self) -> "Manifest":
        for task, is_supported in (
            ("generate", self.decoder is not None),
            ("classify", bool(self.labels) and self.label_kind in ("classes", "independent")),
            ("rerank", bool(self.labels) and self.label_kind == "score"),
            ("tag", bool(self.labels) and self.label_kind == "tokens"),
            ("answer", bool(self.labels) and self.label_kind == "span"),
            ("fill-mask", self.predict is not None and self.tokens.mask_id is not None),
            ("sparse", self.predict is not None),
        ):
            if (task in self.tasks) != is_supported:
                raise ValueError(f"tasks must include {task!r} exactly if its graph, outputs and labels are present")
        if (self.encoder is None) != self.is_decoder_only:
            raise ValueError("encoder must be null exactly if decoder_start is 'source'")
        if self.encoder is None and self.decoder is None:
            raise ValueError("a model without an encoder graph needs a decoder graph")
        if self.encoder is None and any(state.init == "encoder" for state in self.states):
            raise ValueError("states of a model without an encoder graph must have init 'zeros'")
        output = LABEL_OUTPUTS[self.label_kind]
        if self.labels and output not in (() if self.encoder is None else self.encoder.outputs):
            raise ValueError(f"labels of kind {self.label_kind!r} need the encoder output {output!r}")
        for before, after in pairwise(() if self.embedding is None else self.embedding.dense):
            if before.outputs != after.inputs:
                sizes = f"{after.inputs} inputs after one with {before.outputs} outputs"
                raise ValueError(f"a layer of embedding.dense has {sizes}")
        if self.training_unit == "sentence" and (self.encoder is None or self.decoder is None):
            raise ValueError("training_unit 'sentence' requires an encoder and a decoder")
        if self.pair_template and not self.labels:
            raise ValueError("pair_template requires labels")
        if self.languages and "generate" not in self.tasks:
            raise ValueError("languages requires the task 'generate'")
        return self

    @model_validator(mode="after")
    def _check_chosen_heads(self) -> "Manifest":
        cross = self.cross_attention
        for name, chosen in (("alignment", self.alignment), ("coverage", self.coverage)):
            if chosen is None:
                continue
            if cross is None:
                raise ValueError(f"{name} must be null if there is no attention of the kind 'cross'")
            heads = chosen.heads if isinstance(chosen, Alignment) else (chosen.head,)
            if chosen.layer >= cross.layers or max(heads) >= cross.heads:
                raise ValueError(
                    f"{name} must name a layer below {cross.layers} and heads below {cross.heads}, "
                    f"got layer {chosen.layer} and heads {list(heads)}"
                )
        return self

    @property
    def cross_attention(self) -> AttentionMaps | None:
        """Description of the maps of cross-attention; None if the model has none."""
        return next((maps for maps in self.attention if maps.kind == "cross"), None)

    @property
    def alignment_heads(self) -> tuple[AlignmentStep, int, tuple[int, ...]]:
        """The decoder step, the layer and the heads of the cross-attention that align words.

        Without a recorded alignment, they are the step that writes and all heads of the last layer.
        Raises `KeyError` without cross-attention.
        """
        cross = self.attention_of("cross")
        if self.alignment is None:
            return "writes", cross.layers - 1, tuple(range(cross.heads))
        return self.alignment.step, self.alignment.layer, self.alignment.heads

    @property
    def weight_bytes(self) -> int:
        """Size of the graphs and weights on disk in bytes: of all files except the tokenizers."""
        tokenizers = (self.source_tokenizer, self.target_tokenizer)
        return sum(record.bytes for name, record in self.files.items() if name not in tokenizers)

    @property
    def loaded_bytes(self) -> int:
        """Memory that a process needs to load the model, without rows of its decoder, in bytes.

        This is an upper bound that was measured (`docs/how-to/tune.md`): 20 MB, and 1.5 times the
        files. Files with float16 weights count twice, and those whose matrices are only stored in 8
        bits four times, because processors compute with float32.
        """
        size = sum(record.bytes for record in self.files.values())
        stored = self.stored_dtype
        return round(20_000_000 + 1.5 * size * (2 if stored == "float16" else 1 if stored == self.dtype else 4))

    @property
    def stored_dtype(self) -> str:
        """Type of the stored matrices, which a graph may compute with in float32."""
        if self.dtype != "float32":
            return self.dtype
        return "int8" if self.quantization else "float16" if self.half_weights else "float32"

    @property
    def encoder_graph(self) -> Graph:
        """The encoder graph of a model that is known to have one."""
        assert self.encoder is not None, "a decoder-only model has no encoder graph"
        return self.encoder

    @property
    def decoder_graph(self) -> Graph:
        """The decoder graph of a model that is known to generate text."""
        assert self.decoder is not None, "only a model that generates text has a decoder graph"
        return self.decoder

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return tuple(filter(None, (self.encoder, self.decoder, self.rows, self.predict, self.contributions)))

    @property
    def is_decoder_only(self) -> bool:
        """True if the model continues its source, as a causal language model does."""
        return self.decoder_start == "source"

    @property
    def has_prefix_states(self) -> bool:
        """True if the states after some tokens contain those after each shorter prefix.

        They do if every state has a position for each token. A state of fixed size does not keep
        its earlier values.
        """
        return self.is_decoder_only and bool(self.states) and all("target" in state.shape for state in self.states)

    def decoder_prompt_ids(self, source_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that precede the generated tokens in the decoder.

        They are the source of a decoder-only model, and the start tokens of other models. The step
        that gives the first new token reads the last of them.
        """
        return tuple(source_ids) if self.is_decoder_only else self.tokens.start_ids

    def max_new_tokens_for(self, source_tokens: int) -> int:
        """Maximum number of new tokens for a given source length, a target prefix included.

        The final token needs no cache position, because no step reads it.
        """
        prompt_tokens = source_tokens if self.is_decoder_only else len(self.tokens.start_ids)
        return self.limits.max_target_tokens - (prompt_tokens - 1)

    def attention_of(self, kind: str) -> AttentionMaps:
        """Return the first attention maps of one kind. Raises `KeyError` if there are none."""
        by_kind: dict[str, AttentionMaps] = {maps.kind: maps for maps in reversed(self.attention)}
        return by_kind[kind]
