"""Description of a checkpoint: what its graphs, its files and its manifest follow from.

Everything that a checkpoint states about itself comes together here: configuration, weights,
tokenizers, generation settings, languages and pooling.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer

from sightline.base.bundle import (
    ChatTemplate,
    GenerationDefaults,
    Languages,
    Limits,
    PairTemplate,
    SentenceEmbedding,
    Tokens,
    TrainingUnit,
)
from sightline.base.bundle_files import sha256_of
from sightline.base.text.prompt import ChatTemplateError
from sightline.export.families import firefox, trained
from sightline.export.families.description import Description
from sightline.export.families.table import describe, find_family, pass_over_unread, rotary_limits
from sightline.export.families.weights import Array, Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.model import Graphs, build_graphs
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import ExportOptions
from sightline.export.sources.chat_template import read_chat_template
from sightline.export.sources.firefox import FirefoxFiles, find_firefox_files, read_metadata
from sightline.export.sources.firefox.marian_binary import read_file, read_marian
from sightline.export.sources.generation_settings import GenerationSettings, after_forced_token, read_generation
from sightline.export.sources.opened_checkpoint import Config, Folder, FolderFiles, Tensors, stored_tensors
from sightline.export.sources.reranker import read_reranker
from sightline.export.sources.run_folder import RECORD, read_record
from sightline.export.sources.sentence_transformers import SentenceOptions, read_sentence_options
from sightline.export.sources.training_run import TrainingRun
from sightline.export.tokenizers import (
    TOKENIZER_CONFIG,
    ConvertedTokenizers,
    TokenizerFiles,
    contradictions,
    firefox_tokenizer,
    read_or_convert_tokenizers,
    special_ids,
)
from sightline.export.tokenizers.language_tokens import language_tag
from sightline.export.writing import PROMPT_TOKENIZER, TARGET_TOKENIZER, TOKENIZER
from sightline.model.config import CausalConfig, ClassifierConfig, EncoderConfig, RecurrentConfig, architecture_of
from sightline.model.data.chat_template import CHAT_TEMPLATE, IM_END, IM_START
from sightline.model.data.tokenizer_training import BOS, PAD, prompt_tokenizer

if TYPE_CHECKING:
    from sightline.model.architectures.recurrent import RecurrentModel

# Embedding of models that are trained on pairs of similar texts.
MEAN = SentenceEmbedding(pooling="mean", normalize=True)
GENERATION_CONFIG = "generation_config.json"

# A message has one line, so that it cannot begin a line of another role. A system message is the
# start of the next message of the user.
PLAIN_DIALOGUES = ChatTemplate(
    program="{{ bos_token }}{% set system = namespace(text='') %}{% for message in messages %}"
    "{% set text = message.content.splitlines() | join(' ') %}"
    "{% if message.role == 'system' %}{% set system.text = system.text + text + ' ' %}"
    "{% elif message.role == 'user' %}{{ 'User: ' + system.text + text + '\\n' }}{% set system.text = '' %}"
    "{% else %}{{ 'Bot: ' + text + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Bot:' }}{% endif %}",
    tokens={"bos_token": BOS},
)


@dataclass(frozen=True)
class Described:
    """A described checkpoint: what its graphs, its files and its manifest follow from."""

    family: str  # entry of the table of families, such as "bert"
    architecture: str  # informative, such as "BertModel"
    parameters: int
    tokens: Tokens
    limits: Limits
    tokenizers: Mapping[str, Tokenizer]  # by the name of the file
    source_tokenizer: str  # file of the tokenizer of sources, or of the prompts of a decoder-only model
    target_tokenizer: str
    model: Description | None = None  # None for a recurrent model, which has graphs of its own
    weights: Weights | None = None
    recurrent: "RecurrentModel | None" = None
    config: Config | None = None  # of a Hugging Face folder
    languages: Languages | None = None
    training_unit: TrainingUnit = "text"
    chat: ChatTemplate | None = None
    pair_template: PairTemplate | None = None
    reads_pairs: bool = True
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    embedding: SentenceEmbedding | None = None
    dense: tuple[Array, ...] = ()  # content of the file of each layer of `embedding`
    description: str = ""  # used if the user gives none
    notes: tuple[str, ...] = ()  # facts that the user should read


def build(described: Described, file: WeightFile) -> Graphs:
    """Build the graphs of a described checkpoint; their constants are added to `file`.

    Raises `ImportFailedError` if the graphs ignore a part of the configuration or the weights.
    """
    if described.recurrent is not None:
        from sightline.export.graphs.recurrent_graphs import build as build_recurrent

        return build_recurrent(described.recurrent, file)
    assert described.model is not None and described.weights is not None, "all other models have a description"
    graphs = build_graphs(described.model, described.weights, file)
    if described.config is not None:
        described.config.check_all_read()
    described.weights.tensors.check_all_read()
    return graphs


def describe_source(source: FolderFiles, options: ExportOptions) -> Described:
    """Describe a checkpoint, whose weights are read when the graphs are built.

    Raises `ImportFailedError`, or `ValueError` if files of a training run do not belong together.
    """
    if isinstance(source, TrainingRun):
        return _describe_run(source)
    if isinstance(source, Folder):
        return _describe_folder(source, options)
    return _describe_firefox(source, options)


def _describe_run(run: TrainingRun) -> Described:
    """Describe a training run."""
    config = run.config
    is_recurrent, is_causal = isinstance(config, RecurrentConfig), isinstance(config, CausalConfig)
    model, weights, recurrent, parameters = None, None, None, _count(run.tensors)
    if is_recurrent:
        recurrent = cast("RecurrentModel", run.load())
        parameters = sum(parameter.numel() for parameter in recurrent.parameters())  # without buffers
    else:
        try:
            model, weights = trained.describe(config, run.tensors)
        except ImportFailedError as error:
            raise run.unusable(error) from error
    generates = not isinstance(config, ClassifierConfig | EncoderConfig)
    chat, end_ids = _chat_of_run(run) if is_causal else (None, ())
    return Described(
        family=architecture_of(config),
        architecture=architecture_of(config),
        parameters=parameters,
        tokens=Tokens(pad_id=config.pad_id, start_ids=(config.bos_id,), end_ids=(*end_ids, config.eos_id)),
        limits=Limits(
            max_source_tokens=config.max_positions,
            max_target_tokens=config.max_positions if generates else 0,
            vocabulary=config.vocab_size,
        ),
        tokenizers={TOKENIZER: run.tokenizer}
        | ({PROMPT_TOKENIZER: prompt_tokenizer(run.tokenizer)} if is_causal else {}),
        source_tokenizer=PROMPT_TOKENIZER if is_causal else TOKENIZER,
        target_tokenizer=TOKENIZER,
        model=model,
        weights=weights,
        recurrent=recurrent,
        # The only task of an encoder-decoder is translation, of a corpus of sentences.
        training_unit="sentence" if generates and not is_causal else "text",
        chat=chat,
        embedding=MEAN if isinstance(config, EncoderConfig) else None,
        description="" if run.record is None else run.record.description,
    )


def _chat_of_run(run: TrainingRun) -> tuple[ChatTemplate | None, tuple[int, ...]]:
    """Return the chat template of a language model, and the token that ends a message.

    Runs without a record were trained on dialogues in a plain format.
    """
    if run.record is None or run.record.has_dialogues is None:
        return PLAIN_DIALOGUES, ()
    if not run.record.has_dialogues:
        return None, ()
    special = special_ids(run.tokenizer)
    template = ChatTemplate(program=CHAT_TEMPLATE, tokens={"bos_token": BOS, "eos_token": IM_END, "pad_token": PAD})
    missing = [name for name in (IM_START, IM_END) if name not in special]
    if missing:
        raise ValueError(
            f"{run.path / TOKENIZER} has no special token {missing[0]}, but {RECORD} of the run states that it was "
            "trained on dialogues; use the files of one run"
        )
    return template, (special[IM_END],)


def _describe_folder(folder: Folder, options: ExportOptions) -> Described:
    """Describe a Hugging Face checkpoint, which may belong to a training run."""
    record = read_record(folder.path)
    is_translation = record is not None and record.task == "translation"
    family = find_family(folder.config)
    tokenizers = read_or_convert_tokenizers(folder)
    input_names = (folder.json_object(f"{folder.module}{TOKENIZER_CONFIG}") or {}).get("model_input_names")
    sentences = None if folder.json("modules.json") is None else read_sentence_options(folder.json)
    reranker = read_reranker(folder, family.name, sentences, tokenizers.source, options.task)
    model, weights = describe(
        family,
        folder.config,
        folder.tensors,
        tokenizers.source,
        input_names,
        options.max_tokens,
        is_embedding=sentences is not None and not sentences.is_cross_encoder,
        answers=None if reranker is None else reranker.answers,
    )
    if sentences is not None:
        _check_modules(model, sentences)
    notes = list[str]()
    tokenizer_of_file = tokenizers.target
    if tokenizers.target is tokenizers.source:
        fitting, unused = _without_unused(tokenizers.source, model.vocabulary)
        tokenizers = replace(tokenizers, source=fitting, target=fitting)
        if unused:
            notes.append(f"special tokens beyond the vocabulary of the model are left out: {', '.join(unused)}")
    if sentences is None and model.decoder is None and reranker is None:
        sentences = read_sentence_options(folder.json)
    if model.decoder is None:
        generation = _encoder_tokens(folder.config, tokenizers.source)
    else:
        generation_config = folder.json_object(f"{folder.module}{GENERATION_CONFIG}")
        settings = None if generation_config is None else Config(generation_config, GENERATION_CONFIG)
        generation = read_generation(folder.config, settings, model.is_decoder_only)
    limiting = reranker or sentences
    longest = None if limiting is None else limiting.max_tokens
    languages = None
    if model.encoder is not None and model.decoder is not None:
        languages, generation = _languages(folder, tokenizers, generation)
        if record is not None and record.source and record.target and not tokenizers.language_ids:
            languages = Languages(sources=(record.source,), targets=(record.target,))
    rotary = _rotary_note(model, folder.config)
    if not model.reads_pairs:
        notes.append("pairs of texts are refused, because the tokenizer has no form of them that is supported")
    pad_id = folder.config.get("pad_token_id", None)
    ids = {
        "pad_token": (pad_id,) if isinstance(pad_id, int) and not model.is_decoder_only else (),
        "eos_token": generation.end_ids if model.decoder is not None else (),
    }
    notes += contradictions(folder, tokenizer_of_file, ids)
    notes += (*generation.notes, *rotary, *pass_over_unread(folder.config, options.ignored_keys))
    described = Described(
        family=family.name,
        architecture=next(iter(folder.architectures), family.architectures[0]),
        parameters=_count(weights.tensors),
        tokens=_tokens(generation, None if model.predictions is None else _mask_id(folder, tokenizers.source)),
        limits=_limits(model, longest),
        **_files(tokenizers),
        model=model,
        weights=weights,
        config=folder.config,
        languages=languages,
        training_unit="sentence" if is_translation else family.training_unit,
        generation=generation.defaults,
        reads_pairs=model.reads_pairs,
        notes=tuple(notes),
        description="" if record is None else record.description,
    )
    if model.is_decoder_only:
        described = _with_chat(described, folder)
    if reranker is not None:
        return replace(
            described, pair_template=reranker.template, notes=(*described.notes, *filter(None, [reranker.note]))
        )
    if sentences is None:
        return described
    if record is not None and record.task == "encoder" and not folder.has("modules.json"):
        sentences = replace(sentences, embedding=MEAN)
    return _with_embedding(described, folder, sentences)


def _without_unused(tokenizer: Tokenizer, vocabulary: int) -> tuple[Tokenizer, list[str]]:
    """Remove special tokens beyond the vocabulary, and return their names with the tokenizer.

    No text and no template of texts contains them. The tokenizer of Gemma 3 has a token of images
    that models without images do not have.
    """
    document = json.loads(tokenizer.to_str())
    removed = [token for token in document["added_tokens"] if token["special"] and token["id"] >= vocabulary]
    names = [token["content"] for token in removed]
    template = json.dumps(document["post_processor"])
    if not names or any(json.dumps(name) in template for name in names):
        return tokenizer, []
    document["added_tokens"] = [token for token in document["added_tokens"] if token not in removed]
    return Tokenizer.from_str(json.dumps(document)), names


def _check_modules(model: Description, sentences: SentenceOptions) -> None:
    """Check that modules.json suits the architecture."""
    expected, is_complete = "computes embeddings", True
    if sentences.is_cross_encoder:
        expected, is_complete = "scores pairs of texts", model.head is not None
    elif sentences.is_sparse:
        expected, is_complete = "computes sparse vectors", model.predictions is not None
    if model.decoder is not None or not is_complete:
        raise ImportFailedError(
            f"modules.json describes a model that {expected}, but the architecture in config.json does not; remove "
            "modules.json to import the architecture as it is"
        )


def _count(tensors: Tensors) -> int:
    return sum(math.prod(tensors.shape(name)) for name in tensors.names)


def _tokens(generation: GenerationSettings, mask_id: int | None = None) -> Tokens:
    start_ids, end_ids = generation.start_ids, generation.end_ids
    return Tokens(pad_id=generation.pad_id, start_ids=start_ids, end_ids=end_ids, mask_id=mask_id)


def _limits(model: Description, max_tokens: int | None = None) -> Limits:
    positions = model.max_positions if max_tokens is None else min(model.max_positions, max_tokens)
    return Limits(
        max_source_tokens=positions,
        max_target_tokens=0 if model.decoder is None else positions,
        vocabulary=model.vocabulary,
        source_vocabulary=model.source_vocabulary,
    )


def _files(tokenizers: ConvertedTokenizers) -> dict[str, Any]:
    """Return the fields of `Described` for the tokenizers of a checkpoint."""
    if tokenizers.target is tokenizers.source:
        only = {TOKENIZER: tokenizers.source}
        return {"tokenizers": only, "source_tokenizer": TOKENIZER, "target_tokenizer": TOKENIZER}
    both = {TOKENIZER: tokenizers.source, TARGET_TOKENIZER: tokenizers.target}
    return {"tokenizers": both, "source_tokenizer": TOKENIZER, "target_tokenizer": TARGET_TOKENIZER}


def _with_chat(described: Described, folder: Folder) -> Described:
    """Add the chat template, or a note with the reason that there is none."""
    try:
        return replace(described, chat=read_chat_template(folder))
    except ChatTemplateError as error:
        note = f"chat is not available for this model, because its chat template is not supported: {error}"
        return replace(described, notes=(*described.notes, note))


def _rotary_note(model: Description, config: Config) -> tuple[str, ...]:
    """Return a note if the rotary embedding allows shorter texts only than the configuration."""
    limit, configured = min(rotary_limits(model), default=None), config.get("max_position_embeddings", None)
    if limit is None or not isinstance(configured, int) or limit >= configured:
        return ()
    note = (
        f"texts have at most {limit:,} tokens instead of {configured:,}: for longer ones, transformers computes other "
        "rotary frequencies, which change the keys of all earlier tokens"
    )
    return (note,)


def _with_embedding(described: Described, folder: Folder, sentences: SentenceOptions) -> Described:
    """Add the pooling and the layers after it."""
    assert described.model is not None and described.model.encoder is not None, "an encoder has an embedding"
    values, size = list[Array](), described.model.encoder.output_size
    for name_of_folder, layer in sentences.dense:
        tensors = folder.open_tensors(name_of_folder)
        names = ("linear.weight", "linear.bias") if layer.has_bias else ("linear.weight",)
        weight, *bias = [tensors.read(name) for name in names]
        tensors.check_all_read()
        shapes = [(layer.outputs, layer.inputs), (layer.outputs,)]
        for name, array, shape in zip(names, (weight, *bias), shapes, strict=False):
            if layer.inputs != size or array.shape != shape:
                raise ImportFailedError(
                    f"{name_of_folder}config.json: a layer from {layer.inputs} to {layer.outputs} numbers after "
                    f"vectors of {size} has a {name.rpartition('.')[2]} of shape {list(array.shape)}; the folder may "
                    "belong to another checkpoint"
                )
        values.append(np.concatenate([weight.ravel(), *bias]))
        size = layer.outputs
    embedding = sentences.embedding.model_copy(update={"dense": tuple(layer for _, layer in sentences.dense)})
    parameters = described.parameters + sum(map(len, values))
    return replace(described, embedding=embedding, dense=tuple(values), parameters=parameters)


def _encoder_tokens(config: Config, tokenizer: Tokenizer) -> GenerationSettings:
    """Return the special tokens of a model without a decoder: those around a text."""
    around = tokenizer.encode("").ids or [0]
    pad_id = config.get("pad_token_id", None)
    pad_id = pad_id if type(pad_id) is int and pad_id >= 0 else around[-1]
    return GenerationSettings(pad_id, (around[0],), (around[-1],), GenerationDefaults())


def _mask_id(folder: Folder, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that stands for one to predict, None if there is none."""
    named, special = TokenizerFiles(folder).special_token("mask_token"), special_ids(tokenizer)
    names = [named] if named else ["[MASK]", "<mask>"]  # the defaults of the tokenizers of these families
    return next((special[name] for name in names if name in special), None)


def _languages(
    folder: Folder, tokenizers: ConvertedTokenizers, generation: GenerationSettings
) -> tuple[Languages | None, GenerationSettings]:
    """Return the languages of a translation model, and its generation settings without languages.

    The languages are None if the checkpoint does not name them. A configuration for one target
    language forces the token of that language. With languages, the request chooses the token, and
    that language is the default.
    """
    config = folder.json(f"{folder.module}{TOKENIZER_CONFIG}") or {}
    ids = tokenizers.language_ids
    prefixes: dict[str, tuple[int, ...]] = {tag: (id_,) for tag, id_ in ids.items()}
    if folder.model_type == "marian":
        source, target = (language_tag(str(config.get(f"{side}_lang") or "")) for side in ("source", "target"))
        if ids:  # the target language is a token before the source
            marian_sources = (source or "mul",)
            return Languages(sources=marian_sources, targets=tuple(ids), source_prefix_of_target=prefixes), generation
        return Languages(sources=(source,), targets=(target,)) if source and target else None, generation
    if not ids:
        return None, generation
    sources = tuple(sorted(ids, key=lambda tag: tag != "en"))  # English first
    started = next((tag for tag, id_ in ids.items() if generation.start_ids == (id_,)), None)
    if folder.model_type == "mbart" and started is not None:
        # mBART-25: the source ends with its language, and the target starts with its own.
        return Languages(sources=sources, targets=(started,), source_suffix=prefixes), generation
    if folder.model_type == "mbart" and "50" not in str(config.get("tokenizer_class")):
        raise ImportFailedError(
            "mBART needs its language tokens in one of two places: for mBART-25, decoder_start_token_id must be the "
            f"token of the target language, such as {ids[sources[0]]} for {sources[0]}, without a forced token; for "
            "mBART-50, tokenizer_config.json must have the tokenizer_class MBart50Tokenizer"
        )
    forced = [tag for tag, prefix in prefixes.items() if prefix[0] in generation.start_ids[1:]]
    targets = [*forced, *(tag for tag in ids if tag not in forced)]
    languages = Languages(sources=sources, targets=tuple(targets), source_prefix=prefixes, target_prefix=prefixes)
    if len(generation.start_ids) == 1:  # lengths do not count the token of the language yet
        generation = after_forced_token(generation)
    return languages, replace(generation, start_ids=generation.start_ids[:1])


def _describe_firefox(folder: FolderFiles, options: ExportOptions) -> Described:
    """Describe a Firefox translation model."""
    files = find_firefox_files(folder.path)
    paths = {path.name: folder.locate(path.name) for path in files.paths}
    folder.files |= {name: sha256_of(path) for name, path in paths.items() if path is not None}
    marian = read_marian(files.model)
    tensors = Tensors(stored_tensors(marian), str(files.model))
    model, weights = firefox.describe(marian.config, tensors, str(files.model), options.max_tokens)
    target_size = model.vocabulary - 1  # without the added start token
    tokenizers = _firefox_tokenizers(files, (model.source_vocabulary or target_size, target_size))
    metadata = read_metadata(folder, files)
    generation = firefox.generation(model, tokenizers.target.token_to_id("<unk>"))
    pair = metadata.languages or files.source_and_target
    return Described(
        family="firefox",
        architecture=metadata.architecture,
        parameters=_count(tensors),
        tokens=_tokens(generation),
        limits=_limits(model),
        **_files(tokenizers),
        model=model,
        weights=weights,
        languages=None if pair is None else Languages(sources=pair[:1], targets=pair[1:]),
        training_unit="sentence",  # Firefox itself splits the text of a page into sentences
        generation=generation.defaults,
        description=metadata.description,
    )


def _firefox_tokenizers(files: FirefoxFiles, sizes: tuple[int, int]) -> ConvertedTokenizers:
    """Convert the vocabularies of a model with these sizes of its source and target vocabulary."""
    source, target = vocabularies = files.source_vocabulary, files.target_vocabulary
    tokenizers = {path: firefox_tokenizer(read_file(path), path.name) for path in dict.fromkeys(vocabularies)}
    for path, size in zip(vocabularies, sizes, strict=True):
        if tokenizers[path].get_vocab_size() > size:
            raise ImportFailedError(
                f"{path} has {tokenizers[path].get_vocab_size()} tokens, but {files.model.name} has only {size}; they "
                "belong to different models: download both again"
            )
    return ConvertedTokenizers(tokenizers[source], tokenizers[target], {})
