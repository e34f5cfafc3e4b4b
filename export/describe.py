"""Construction of the graphs of a checkpoint.

Everything that a checkpoint says about itself comes together here: configuration, weights,
tokenizers, generation settings, languages and pooling.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from export.built import Built
from export.errors import ImportFailedError
from export.families import firefox
from export.families.description import Description
from export.families.table import describe, find_family
from export.families.weights import Array, Weights
from export.graphs.builder import WeightFile
from export.graphs.model import build_graphs
from export.options import ImportOptions
from export.sources.checkpoint import Config, Folder, FolderFiles, StoredTensor, Tensors
from export.sources.firefox import SHORTLIST_FILE, FirefoxFiles, find_firefox_files, read_metadata
from export.sources.firefox.marian_binary import open_marian, read_file
from export.sources.firefox.shortlist import Shortlist, parse_shortlist
from export.sources.generation import Generation, read_generation
from export.sources.sentence_transformers import DenseModule, SentenceOptions, read_sentence_options
from export.tokenizers import ConvertedTokenizers, firefox_tokenizer, read_or_convert_tokenizers
from export.tokenizers.languages import language_tag
from export.writing import DENSE
from service.bundle import (
    Dense,
    GenerationDefaults,
    Languages,
    Limits,
    Ops,
    Tokens,
    sha256_of,
)

GENERATION_CONFIG, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


@dataclass(frozen=True)
class _Checkpoint:
    """A described checkpoint."""

    family: str
    architecture: str  # informative
    model: Description
    weights: Weights
    tokenizers: ConvertedTokenizers


def build(folder: Folder, weights: WeightFile, options: ImportOptions) -> Built:
    """Build the graphs of a Hugging Face checkpoint; their constants are added to `weights`.

    Raises:
        ImportFailedError: the checkpoint is not supported.
    """
    checkpoint = _describe(folder, options)
    model, tokenizers = checkpoint.model, checkpoint.tokenizers
    sentences = None if model.decoder is not None else read_sentence_options(folder.json)
    if model.decoder is None:
        generation = _encoder_tokens(folder.config, tokenizers.source)
    else:
        generation_config = folder.json(f"{folder.module}{GENERATION_CONFIG}")
        given = None if generation_config is None else Config(generation_config, GENERATION_CONFIG)
        generation = read_generation(folder.config, given, model.is_decoder_only)
    languages = None
    if model.encoder is not None and model.decoder is not None:
        languages, generation = _languages(folder, tokenizers, generation)
    parameters = sum(math.prod(folder.tensors.shape(name)) for name in folder.tensors.names)
    built = _built(checkpoint, weights, options.ops, parameters, generation, languages, sentences)
    return built if sentences is None else _with_dense(built, folder, sentences.dense, model)


def _with_dense(built: Built, folder: Folder, modules: Sequence[DenseModule], model: Description) -> Built:
    """Add the layers after pooling.

    Raises:
        ImportFailedError: their weights are missing, or have another size.
    """
    assert built.embedding is not None and model.encoder is not None, "an encoder has an embedding"
    layers, values, size = list[Dense](), list[Array](), model.encoder.width
    for number, module in enumerate(modules):
        tensors = folder.open_tensors(module.folder)
        names = ("linear.weight", "linear.bias") if module.has_bias else ("linear.weight",)
        weight, *bias = [tensors.read(name) for name in names]
        tensors.check_all_read()
        if module.inputs != size or weight.shape != (module.outputs, module.inputs):
            raise ImportFailedError(
                f"{module.folder}config.json: a layer from {module.inputs} to {module.outputs} numbers after vectors "
                f"of {size} has a weight of shape {list(weight.shape)}; the folder may belong to another checkpoint"
            )
        options = asdict(module) | {"file": DENSE.format(number)}
        del options["folder"]
        layers.append(Dense(**options))
        values.append(np.concatenate([weight.ravel(), *bias]))
        size = module.outputs
    embedding = built.embedding.model_copy(update={"dense": tuple(layers)})
    parameters = built.parameters + sum(map(len, values))
    return replace(built, embedding=embedding, dense=tuple(values), parameters=parameters)


def _describe(folder: Folder, options: ImportOptions) -> _Checkpoint:
    """Describe a Hugging Face checkpoint."""
    family = find_family(folder.config)
    tokenizers = read_or_convert_tokenizers(folder)
    input_names = (folder.json(f"{folder.module}{TOKENIZER_CONFIG}") or {}).get("model_input_names")
    tokenizer = json.loads(tokenizers.source.to_str())
    model, named = describe(family, folder.config, folder.tensors, tokenizer, input_names, options.max_tokens)
    architecture = next(iter(folder.architectures), family.architectures[0])
    return _Checkpoint(family.name, architecture, model, named, tokenizers)


def _built(
    checkpoint: _Checkpoint,
    weights: WeightFile,
    ops: Ops,
    parameters: int,
    generation: Generation,
    languages: Languages | None,
    sentences: SentenceOptions | None,
) -> Built:
    model, named = checkpoint.model, checkpoint.weights
    graphs = build_graphs(model, named, weights, ops)
    positions = model.max_positions
    if sentences is not None and sentences.max_tokens is not None:
        positions = min(positions, sentences.max_tokens)
    tokenizers = checkpoint.tokenizers
    return Built(
        family=checkpoint.family,
        architecture=checkpoint.architecture,
        parameters=parameters,
        graphs=graphs,
        tokens=Tokens(pad_id=generation.pad_id, start_ids=generation.start_ids, end_ids=generation.end_ids),
        limits=Limits(
            max_source_tokens=positions,
            max_target_tokens=0 if graphs.decoder is None else positions,
            vocabulary=model.vocabulary,
            source_vocabulary=graphs.source_vocabulary,
        ),
        source_tokenizer=tokenizers.source,
        target_tokenizer=None if tokenizers.target is tokenizers.source else tokenizers.target,
        languages=languages,
        generation=generation.defaults,
        embedding=None if sentences is None else sentences.embedding,
        guided_alignment=model.guided_alignment,
    )


def _encoder_tokens(config: Config, tokenizer: Tokenizer) -> Generation:
    """Return the special tokens of a model without a decoder: those around a text."""
    around = tokenizer.encode("").ids or [0]
    pad_id = config.get("pad_token_id", None)
    pad_id = pad_id if isinstance(pad_id, int) and pad_id >= 0 else around[-1]
    return Generation(pad_id, (around[0],), (around[-1],), GenerationDefaults())


def _languages(
    folder: Folder, tokenizers: ConvertedTokenizers, generation: Generation
) -> tuple[Languages | None, Generation]:
    """Return the languages of a translation model, and its generation settings without languages.

    The languages are None if the checkpoint does not name them. A configuration for one target
    language forces the token of that language. With languages, the request chooses the token, and
    that language is the default.

    Raises:
        ImportFailedError: the tokens of languages are in places that are not supported.
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
    return languages, replace(generation, start_ids=generation.start_ids[:1])


def build_firefox(folder: FolderFiles, weights: WeightFile, options: ImportOptions) -> Built:
    """Build the graphs of a Firefox translation model; their constants are added to `weights`.

    Raises:
        ImportFailedError: the model is not supported.
    """
    files = find_firefox_files(folder.path)
    with _open_firefox(folder, files, options) as (checkpoint, tensors):
        metadata = read_metadata(folder, files)
        unknown_id = checkpoint.tokenizers.target.token_to_id("<unk>")
        generation = firefox.generation(checkpoint.model, unknown_id)
        parameters = sum(math.prod(tensors.shape(name)) for name in tensors.names)
        pair = metadata.languages or files.source_and_target
        languages = None if pair is None else Languages(sources=pair[:1], targets=pair[1:])
        built = _built(checkpoint, weights, options.ops, parameters, generation, languages, None)
        tensors.check_all_read()
    return replace(built, architecture=metadata.architecture, description=metadata.description)


@contextmanager
def _open_firefox(
    folder: FolderFiles, files: FirefoxFiles, options: ImportOptions
) -> Iterator[tuple[_Checkpoint, Tensors]]:
    """Describe a Firefox translation model, whose tensors can be read within the context."""
    used = [*files.required, *([files.shortlist] if options.shortlist and files.shortlist else [])]
    paths = {path.name: folder.locate(path.name) for path in used}
    folder.files |= {name: sha256_of(path) for name, path in paths.items() if path is not None}
    with open_marian(files.model) as marian:
        stored = {name: StoredTensor(marian.shape(name), partial(marian.tensor, name)) for name in marian.names}
        tensors = Tensors(stored, str(files.model))
        model, named = firefox.describe(marian.config, tensors, str(files.model), options.max_tokens)
        sizes = firefox.vocabulary_sizes(model)
        if options.shortlist:
            model = replace(model, shortlist=_read_shortlist(folder.path, files, sizes))
        source = firefox_tokenizer(read_file(files.source_vocabulary), files.source_vocabulary.name)
        target = source
        if files.target_vocabulary != files.source_vocabulary:
            target = firefox_tokenizer(read_file(files.target_vocabulary), files.target_vocabulary.name)
        vocabularies = ((source, files.source_vocabulary), (target, files.target_vocabulary))
        for (tokenizer, path), size in zip(vocabularies, sizes, strict=True):
            if tokenizer.get_vocab_size() > size:
                raise ImportFailedError(
                    f"{path} has {tokenizer.get_vocab_size()} tokens, but {files.model.name} has only {size}; they "
                    "belong to different models: download both again"
                )
        tokenizers = ConvertedTokenizers(source, target, files.source_vocabulary.name, {})
        yield _Checkpoint("firefox", "firefox", model, named, tokenizers), tensors


def _read_shortlist(folder: Path, files: FirefoxFiles, sizes: tuple[int, int]) -> Shortlist:
    """Read the shortlist of a model with these sizes of its source and target vocabulary."""
    if files.shortlist is None:
        raise ImportFailedError(
            f"{folder} has no shortlist {SHORTLIST_FILE.format(files.languages)}; download it to the folder, or import "
            "without --shortlist"
        )
    return parse_shortlist(
        read_file(files.shortlist),
        str(files.shortlist),
        source_size=sizes[0],
        target_size=sizes[1],
        is_shared=files.source_vocabulary == files.target_vocabulary,
    )


@contextmanager
def described(folder: FolderFiles, options: ImportOptions) -> Iterator[tuple[Description, Weights]]:
    """Describe a checkpoint, whose weights can be read within the context.

    Raises:
        ImportFailedError: the checkpoint is not supported.
    """
    if isinstance(folder, Folder):
        checkpoint = _describe(folder, options)
        yield checkpoint.model, checkpoint.weights
        return
    with _open_firefox(folder, find_firefox_files(folder.path), options) as (checkpoint, _):
        yield checkpoint.model, checkpoint.weights
