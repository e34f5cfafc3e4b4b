"""Action of `sightline train TASK`: from the files of a user to a run.

The flow of a training: the files are found and checked, a tokenizer is trained or read, the data
are encoded into the folder of the run, the settings that the user left open are chosen from the
data, and the trainer trains. Each error in options or data is raised before the first update.
"""

import dataclasses
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import nn

from sightline.base.errors import UsageError
from sightline.base.options import flag_name
from sightline.model.architectures.factory import build_model
from sightline.model.checkpoint import load_metadata, replace_text
from sightline.model.config import ArchitectureConfig, PretrainedConfig, TransformerConfig, read_model_config
from sightline.model.config_fields import read_fields, to_json
from sightline.model.data.alignments import read_links
from sightline.model.data.chat_format import CHAT_TEMPLATE, CHAT_TOKENS
from sightline.model.data.chat_template import encode_records
from sightline.model.data.corpus import Corpus, open_corpus
from sightline.model.data.encoding import encode
from sightline.model.data.formats import READING_OPTIONS, Reading
from sightline.model.data.learnt_texts import learnt_texts, read_texts
from sightline.model.data.preparation import (
    CONTRADICTIONS,
    MAX_LISTED_TEXTS,
    Facts,
    Prepared,
    check_corpus,
    check_space,
    prepare,
    summary,
)
from sightline.model.data.pretrained import PRETRAINED, encode_pairs
from sightline.model.data.records import TaskName
from sightline.model.data.similar_texts import encode_reranking, encode_similar
from sightline.model.data.teaching import with_teacher
from sightline.model.data.tokenizer_training import adapt_tokenizer, read_tokenizer, token_fields, train_tokenizer
from sightline.model.precision import default_device
from sightline.model.training.classification import CLASSIFICATION, TAGGING, class_weights, label_loss
from sightline.model.training.contrastive import ENCODER
from sightline.model.training.folder import RunFolder, locked
from sightline.model.training.guided import GuidedTrainer
from sightline.model.training.language_model import LANGUAGE_MODEL
from sightline.model.training.options import (
    AUTO,
    FIELDS,
    FLAGS,
    Value,
    defaults_of,
    options_to_toml,
    read_options,
    read_task,
    training_fields,
    with_flags,
)
from sightline.model.training.recipe import (
    MAX_LENGTH_TOKENS,
    SETTINGS_OF_LENGTH,
    Recipe,
    choose,
    choose_vocabulary,
    num_characters,
)
from sightline.model.training.reranking import RERANKING
from sightline.model.training.start import start_from, start_from_pretrained
from sightline.model.training.task import Task
from sightline.model.training.train_config import CHANGEABLE, Precision, read_train_config
from sightline.model.training.trainer import Trainer
from sightline.model.training.translation import TRANSLATION

TASKS: Mapping[TaskName, Task[Any, Any]] = {
    task.name: task for task in (TRANSLATION, CLASSIFICATION, LANGUAGE_MODEL, ENCODER, RERANKING, TAGGING)
}
# Checks a third-party tokenizer before this process reads it.
CheckTokenizer: TypeAlias = Callable[[Path], None]
# Reads the checkpoint of `--from` for a task, with the chat template for a checkpoint that has none
# if the data have dialogues, and the languages of a translation. Yields the folder of the weights,
# and for a checkpoint that others wrote one with its other files, see
# `sightline.model.data.pretrained`.
ReadCheckpoint: TypeAlias = Callable[
    [str, TaskName, str | None, tuple[str, str] | None], AbstractContextManager[tuple[Path, Path | None]]
]
# `Translate` with the bundle of `--teacher`, the languages of the data and a number of threads.
Teach = Callable[[Path, tuple[str, str] | None, int, Sequence[str], Path], None]
OPTIONS_FILE = "options.toml"  # in the folder of a run
BYTES_OF_STATE = 12  # of a parameter: float32 weight and two moments of Adam
BYTES_OF_WEIGHT = 4


@dataclass(frozen=True)
class _Beginning:
    """Tokenizer of a run, and the model that it starts from, if there is one."""

    tokenizer: Tokenizer
    model: ArchitectureConfig | None = None
    initialise: Callable[[nn.Module], None] | None = None
    learnt_share: float | None = None  # of the texts of train, if the tokenizer was trained on them
    files: Path | None = None  # folder of the files of a checkpoint of others


def train(
    task: TaskName,
    data: Path,
    run: Path,
    options: Mapping[str, Value],
    check_tokenizer: CheckTokenizer,
    read_checkpoint: ReadCheckpoint,
    teach: Teach,
) -> None:
    """Train a model on data, or resume the run. `options` are those that the user gave, by their
    keys in a configuration file. Raises `UsageError` for options or data that can never work, and
    `OSError` or `ValueError` as `Trainer` does.
    """
    with locked(run), ExitStack() as opened:
        trainer, license_ = _trainer(task, data, run, options, check_tokenizer, read_checkpoint, teach, opened)
        opened.close()  # the weights of a checkpoint are read
        trainer.fit()
        # A run that had finished before writes no record, but its license may be new.
        record = trainer.folder.record
        replace_text(record, to_json({**read_fields(record), "license": license_}))
    show([f"evaluate it: sightline evaluate {run}", f"export it: sightline export {run} --out bundles/{run.name}"])


def show(lines: Sequence[str]) -> None:
    """Print lines for the user."""
    for line in lines:
        print(line, file=sys.stderr)


def _trainer(
    task: TaskName,
    data: Path,
    run: Path,
    options: Mapping[str, Value],
    check_tokenizer: CheckTokenizer,
    read_checkpoint: ReadCheckpoint,
    teach: Teach,
    opened: ExitStack,
) -> tuple[Trainer, str | None]:
    """Prepare a run; return its trainer and the license. Checkpoints stay open in `opened`."""
    folder = RunFolder(run)
    is_resumed = folder.state.exists()
    stored = _stored_options(folder, task) if is_resumed else {}
    values = {**defaults_of(task), **stored, **options}
    if is_resumed:
        _check_unchanged(folder, task, stored, values)
    if task == "reranking" and not _text(values, "from"):
        raise UsageError(
            "a reranker starts from an encoder that others trained on much text; name it with --from: minilm, a "
            "folder, or OWNER/NAME of a hub"
        )

    names = {name: _text(values, name) for name in READING_OPTIONS}
    reading = Reading(task, **names, multi_label=bool(values.get("multi_label")))
    corpus = open_corpus(data, reading, int(values["split_seed"]))
    facts, given = check_corpus(corpus), corpus
    if len(facts.contradictions) > MAX_LISTED_TEXTS:
        replace_text(run / CONTRADICTIONS, "".join(f"{line}\n" for line in facts.contradictions))
    notes = list[str]()
    guide = _guide(values, corpus)
    if teacher := _text(values, "teacher"):
        translate = partial(teach, Path(teacher), corpus.languages, int(values["threads"]))
        corpus, note = with_teacher(corpus, run, None if is_resumed else translate)
        facts = check_corpus(corpus)
        notes.append(note)
    if is_resumed:
        beginning = _Beginning(read_tokenizer(folder.tokenizer), read_model_config(folder.config))
    elif _text(values, "from"):
        beginning = _start_from(task, corpus, facts, values, notes, opened, read_checkpoint)
    else:
        beginning = _from_tokenizer(task, corpus, facts, values, notes, check_tokenizer)
    fields = training_fields(values)
    if fields.get("lora") and not isinstance(beginning.model, PretrainedConfig):
        raise UsageError("--lora needs --from with a third-party checkpoint; add it, or omit --lora")
    if is_resumed:
        fields = _resumed_fields(folder, fields, notes)
    prepared, links = _prepare(run, corpus, facts, beginning, values), None
    if isinstance(guide, Path):
        links, note = read_links(guide, corpus.train, prepared.tokenizer, prepared.train)
        prepared = dataclasses.replace(prepared, digest=f"{prepared.digest} {links.digest()}")
        notes.append(note)
    trained = _with_class_weights(TASKS[task], prepared.facts, values, notes)
    show([*summary(prepared.facts, is_trained=bool(_text(values, "from"))), *notes])
    recipe = _recipe(prepared.facts, beginning, values, fields, corpus)
    _check_space(run, recipe)
    if recipe.config.max_minutes and "warmup_steps" not in fields:
        updates = _updates_in_time(trained, prepared, recipe)
        recipe = _recipe(prepared.facts, beginning, values, fields, corpus, updates)
    show(recipe.reasons)
    replace_text(run / OPTIONS_FILE, options_to_toml(task, values))
    record = read_fields(folder.record) if folder.record.exists() else {}
    details = {"learnt_share": beginning.learnt_share, **_details(given, prepared, values, data, record)}
    if is_resumed:
        details["learnt_share"] = record.get("learnt_share")
    if beginning.files is not None:
        shutil.copytree(beginning.files, run / PRETRAINED, dirs_exist_ok=True)
    make: Callable[..., Trainer] = partial(GuidedTrainer, links=links) if guide else Trainer
    trainer = make(
        run,
        recipe.config,
        trained,
        prepared,
        recipe.model,
        initialise=beginning.initialise,
        details=details,
        flags=FLAGS,
    )
    return trainer, details["license"]


def _guide(values: Mapping[str, Value], corpus: Corpus) -> Path | str | None:
    """Return the file of links to which a head is guided, `AUTO` if the model finds them, None if
    no head is guided.
    """
    guide, teacher = _text(values, "guided_alignment"), _text(values, "teacher")
    path = corpus.train.files[0].with_suffix(".align") if guide == AUTO else Path(guide or "")
    if guide is None or (guide == AUTO and (teacher or not path.is_file())):
        return guide
    if teacher:
        raise UsageError(
            f"{path} aligns the targets of the data, which --teacher replaces; give --guided-alignment without a file, "
            "so that the model aligns the translations of the teacher itself"
        )
    if not path.is_file():
        raise UsageError(
            f"missing file {path}; name a file of links with --guided-alignment, or give it without a file, so that "
            "the model finds the links itself"
        )
    return path


def _text(values: Mapping[str, Value], name: str) -> str | None:
    """Return an option that is a text, None if it is not used."""
    return str(values.get(name, "")) or None


def _stored_options(folder: RunFolder, task: TaskName) -> dict[str, Value]:
    """Return the options of the run in a folder. Raises `UsageError` for a run of another task, or
    one that another command started.
    """
    path = folder.path / OPTIONS_FILE
    if not path.is_file():
        raise UsageError(f"{folder} contains a run without {OPTIONS_FILE} of another command; choose another folder")
    stored = read_task(path)
    if stored != task:
        raise UsageError(f"{folder} contains a run of the task {stored}, not {task}; choose another folder")
    return read_options(path, task)


def _check_unchanged(
    folder: RunFolder, task: TaskName, stored: Mapping[str, Value], values: Mapping[str, Value]
) -> None:
    """Check that a resumed run has the options that it was started with."""
    changed = [
        flag_name(key)
        for key, default in defaults_of(task).items()
        if FIELDS.get(key, key) not in CHANGEABLE and key != "license" and values[key] != stored.get(key, default)
    ]
    if changed:
        raise UsageError(f"{folder} contains a run with other values of {', '.join(changed)}; choose another folder")


def _resumed_fields(folder: RunFolder, overrides: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the settings of a resumed run: those of its folder, unless the user gave others.

    If the number of epochs changes, settings that depend on it and that the user left open are
    missing, so that they are chosen again. If the run has a limit of minutes, the distance between
    validations stays, because the time decides it.
    """
    settings = dataclasses.asdict(read_train_config(folder.settings))
    fields, before, done = {**settings, **overrides}, settings["max_epochs"], 0
    with suppress(ValueError):  # the trainer raises the error of a damaged state
        done = load_metadata(folder.state).get("epoch", 0)
    chosen = SETTINGS_OF_LENGTH - overrides.keys() - ({"evaluate_epochs"} if fields["max_minutes"] else set())
    if chosen and fields["max_epochs"] != before and fields["max_epochs"] > done:
        flags = ", ".join(sorted(FLAGS[name] for name in chosen))
        notes.append(f"{flags}: chosen again, for {fields['max_epochs']} epochs instead of {before}")
        fields = {name: value for name, value in fields.items() if name not in chosen}
    return fields


def _start_from(
    task: TaskName,
    corpus: Corpus,
    facts: Facts,
    values: Mapping[str, Value],
    notes: list[str],
    opened: ExitStack,
    read_checkpoint: ReadCheckpoint,
) -> _Beginning:
    for name in ("tokenizer", "size", "vocab_size", "decoder"):
        if values.get(name, "") not in ("", AUTO, "transformer"):
            raise UsageError(f"{flag_name(name)} cannot be combined with --from, which determines it; omit it")
    template = CHAT_TEMPLATE if facts.has_dialogues else None
    name, labels = str(values["from"]), facts.outputs
    folder, parts = opened.enter_context(read_checkpoint(name, task, template, corpus.languages))
    if parts is None:
        start = start_from(folder, task, labels)
    else:
        start = start_from_pretrained(folder, parts, labels, multi_label=bool(values.get("multi_label")))
    config = start.config
    if isinstance(config, TransformerConfig):
        config = dataclasses.replace(config, guided_alignment=False)  # unless this run guides it again
    elif _text(values, "guided_alignment"):
        raise UsageError(f"--guided-alignment trains a Transformer of this project, which {name} is not; omit it")
    if values["dropout"] != AUTO:
        config = dataclasses.replace(config, dropout=float(values["dropout"]))
    notes += [note.replace(str(folder), name) for note in start.notes]  # a download is in a temporary folder
    return _Beginning(start.tokenizer, config, start.initialise, files=parts and parts / PRETRAINED)


def _from_tokenizer(
    task: TaskName,
    corpus: Corpus,
    facts: Facts,
    values: Mapping[str, Value],
    notes: list[str],
    check_tokenizer: CheckTokenizer,
) -> _Beginning:
    """Read the given tokenizer, or train one."""
    special_tokens = CHAT_TOKENS if facts.has_dialogues else ()
    path = _text(values, "tokenizer")
    if path is not None:
        if not Path(path).is_file():
            raise UsageError(f"missing file {path}; name a tokenizer.json with --tokenizer")
        check_tokenizer(Path(path))
        try:
            return _Beginning(adapt_tokenizer(read_tokenizer(Path(path)), task, special_tokens))
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        except ValueError as error:
            raise UsageError(f"{error}; name a tokenizer.json of the library tokenizers with --tokenizer") from None
    size = values["vocab_size"]
    if size == AUTO:
        size, reason = choose_vocabulary(facts)
        notes.append(reason)
    seed = int(values["seed"])
    texts, halvings = learnt_texts(lambda: read_texts(corpus.train), 4 * num_characters(facts), seed)
    try:
        tokenizer = train_tokenizer(texts, int(size), special_tokens)
    except ValueError as error:
        raise UsageError(with_flags(str(error))) from None
    if halvings:
        notes.append(
            f"the tokenizer is trained on about 1/{2**halvings} of the texts, chosen with the seed {seed}, because all "
            "have too many different words for the memory"
        )
    num_tokens = tokenizer.get_vocab_size()
    if num_tokens < int(size):
        notes.append(f"the vocabulary has only {num_tokens:,} tokens, because the texts have no more pairs to merge")
    return _Beginning(tokenizer, learnt_share=2.0**-halvings)


def _prepare(run: Path, corpus: Corpus, facts: Facts, beginning: _Beginning, values: Mapping[str, Value]) -> Prepared:
    limit = values["max_length_tokens"]
    longest = MAX_LENGTH_TOKENS if limit == AUTO else int(limit)
    if beginning.model is not None:
        longest = min(longest, beginning.model.max_positions)
    encoder = partial(_encode, facts=facts, labels=facts.outputs, max_length_tokens=longest, model=beginning.model)
    return prepare(run, corpus, facts, beginning.tokenizer, encoder, longest)


def _encode(
    tokenizer: Tokenizer,
    records: Sequence[Any],
    *,
    facts: Facts,
    labels: Sequence[str],
    max_length_tokens: int,
    model: Any,
) -> list[Any]:
    """Encode records for a model of this project, or for a third-party one."""
    try:
        if facts.task == "encoder":
            return encode_similar(tokenizer, records, facts.score_limits)
        if facts.task == "reranking":
            return encode_reranking(tokenizer, records, facts.score_limits, max_length_tokens)
        if isinstance(model, PretrainedConfig) and model.task == "language-model":
            encoded = encode_records(model, tokenizer, records, max_length_tokens)
            return [example for parts in encoded for example in parts]
        if isinstance(model, PretrainedConfig) and model.task == "translation":
            return encode_pairs(model, tokenizer, records)
        return encode(tokenizer, records, labels=labels, max_length_tokens=max_length_tokens)
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        # The library tokenizers raises only these two.
        raise UsageError(f"the tokenizer fails for a text of the data: {error}; use another tokenizer") from None


def _with_class_weights(
    task: Task[Any, Any], facts: Facts, values: Mapping[str, Value], notes: list[str]
) -> Task[Any, Any]:
    """Return a task whose loss has class weights if the user wants them."""
    if not values.get("class_weights"):
        return task
    weights = class_weights(facts.labels, facts.examples["train"], multi_label=bool(values["multi_label"]))
    pairs = sorted(zip(weights.tolist(), facts.labels, strict=True))
    ends = [f"{weight:.2g} ({label})" for weight, label in (pairs[0], pairs[-1])]
    notes.append(f"class weights from {ends[0]} to {ends[1]}")
    return dataclasses.replace(task, training_loss=partial(label_loss, weights=weights))


def _updates_in_time(task: Task[Any, Any], prepared: Prepared, recipe: Recipe) -> int:
    """Return how many updates `max_minutes` allow, measured with random weights."""
    config = recipe.config
    with TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder), config, task, prepared, recipe.model, initialise=lambda model: None)
        _, seconds = trainer.measure_updates(3, time.monotonic)
    return int(60 * config.max_minutes / (seconds * config.accumulate))


def _recipe(
    facts: Facts,
    beginning: _Beginning,
    values: Mapping[str, Value],
    fields: dict[str, Any],
    corpus: Corpus,
    updates_in_time: int | None = None,
) -> Recipe:
    """Choose the settings that the user left open. Raises `UsageError` for given ones that
    contradict each other.
    """
    if values["precision"] == AUTO and "precision" not in fields:
        precision: Precision = "bfloat16" if default_device().type == "cuda" else "float32"
        fields["precision"] = precision
    size, dropout = values["size"], values["dropout"]
    start = "random"
    if _text(values, "from"):
        start = "checkpoint" if isinstance(beginning.model, PretrainedConfig) else "run"
    try:
        return choose(
            facts,
            token_fields(beginning.tokenizer) if beginning.model is None else {},
            fields,
            size=None if size == AUTO else size,  # type: ignore[arg-type]  # one of the choices
            dropout=None if dropout == AUTO else float(dropout),
            multi_label=corpus.reading.multi_label,
            decoder=values.get("decoder", "transformer"),  # type: ignore[arg-type]  # one of the choices
            model=beginning.model,
            start=start,  # type: ignore[arg-type]
            updates_in_time=updates_in_time,
        )
    except ValueError as error:
        raise UsageError(with_flags(str(error))) from None


def _check_space(run: Path, recipe: Recipe) -> None:
    """Check that the disk has space for two states, and for the weights that a run keeps. Existing
    checkpoints count as space, because the run keeps or replaces them, but a new state and the
    weights of an epoch are always written before older ones are removed.
    """
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(recipe.model).parameters())
    kept = recipe.config.average_last + 3  # of the last epochs and the next, averaged and best
    present = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    needed = parameters * (2 * BYTES_OF_STATE + kept * BYTES_OF_WEIGHT) - present
    check_space(run, max(needed, parameters * (BYTES_OF_STATE + BYTES_OF_WEIGHT)))


def _details(
    corpus: Corpus, prepared: Prepared, values: Mapping[str, Value], data: Path, earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Return facts for the record of a run that no other file of the run has. `earlier` is the
    record so far, whose commands are kept.
    """
    commands, command = str(earlier.get("command") or "").splitlines(), shlex.join(["sightline", *sys.argv[1:]])
    details: dict[str, Any] = {
        "command": "\n".join(commands if command in commands else [*commands, command]),
        "examples": dict(prepared.facts.examples),
        "license": _text(values, "license"),
        "data": dict(corpus.digests),
        "data_path": str(data.resolve()),
        "split_seed": corpus.split_seed,
        "reading": {name: value for name in READING_OPTIONS if (value := getattr(corpus.reading, name)) is not None},
        "summary": summary(prepared.facts, is_trained=bool(_text(values, "from"))),
    }
    if corpus.languages is not None:
        details["source"], details["target"] = corpus.languages
    if corpus.reading.task in ("classification", "tagging"):
        details["labels"] = dict(prepared.facts.labels)
    if corpus.reading.task == "language-model":
        details["has_dialogues"] = prepared.facts.has_dialogues
    return details
