"""Actions of `sightline train TASK` and `sightline evaluate`: from the files of a user to a run.

The flow of a training: the files are found and checked, a tokenizer is trained or read, the data
are encoded into the folder of the run, the settings that the user left open are chosen from the
data, and the trainer trains. Each error in options or data is raised before the first update.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
from sightline.model.commands import evaluate_split, write_json
from sightline.model.config import ModelConfig, PretrainedConfig, architecture_of, read_model_config
from sightline.model.data.chat_format import CHAT_TEMPLATE, CHAT_TOKENS
from sightline.model.data.chat_template import encode_records
from sightline.model.data.corpus import Corpus, Split, open_corpus, open_held_out
from sightline.model.data.encoding import encode
from sightline.model.data.formats import PAIR_TASKS
from sightline.model.data.learnt_texts import learnt_texts, read_texts
from sightline.model.data.preparation import (
    Facts,
    Prepared,
    check_corpus,
    check_space,
    check_writable,
    prepare,
    summary,
)
from sightline.model.data.records import TASK_NAMES, TaskName
from sightline.model.data.tokenizer import adapt_tokenizer, read_tokenizer, token_fields, train_tokenizer
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.evaluation.evaluate import evaluate_checkpoint, headline
from sightline.model.fields import read_fields, to_json
from sightline.model.parts import CONFIG, load_parts
from sightline.model.training.classification import CLASSIFICATION
from sightline.model.training.config import CHANGEABLE, Precision, TrainConfig, read_train_config
from sightline.model.training.display import check_tensorboard
from sightline.model.training.distributed import World, default_device
from sightline.model.training.encoder import ENCODER
from sightline.model.training.folder import RunFolder, locked
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
from sightline.model.training.start import TASK_ARCHITECTURES, start_from
from sightline.model.training.task import Task
from sightline.model.training.tasks import VALIDATION_SPLITS
from sightline.model.training.trainer import Trainer
from sightline.model.training.translation import TRANSLATION

TASKS: Mapping[TaskName, Task[Any, Any]] = {
    task.name: task for task in (TRANSLATION, CLASSIFICATION, LANGUAGE_MODEL, ENCODER)
}
# Checks files of others before this process reads them: their path, the task, and True if its data
# have dialogues.
CheckFiles: TypeAlias = Callable[[Path, TaskName, bool], None]
OPTIONS_FILE = "options.toml"  # in the folder of a run
BYTES_OF_STATE = 12  # of a parameter: float32 weight and two moments of Adam
BYTES_OF_WEIGHT = 4


@dataclass(frozen=True)
class _Beginning:
    """Tokenizer of a run, and the model that it starts from, if there is one."""

    tokenizer: Tokenizer
    model: ModelConfig | None = None
    initialise: Callable[[nn.Module], None] | None = None
    learnt_share: float | None = None  # of the texts of train, if the tokenizer was trained on them


def train(task: TaskName, data: Path, run: Path, given: Mapping[str, Value], check_files: CheckFiles) -> None:
    """Train a model on data, or resume the run.

    Args:
        task: task of the model.
        data: path of the data.
        run: folder of the run.
        given: options that are given, by their keys in a configuration file.
        check_files: checks files of others.

    Raises:
        UsageError: options or data can never work.
        OSError, ValueError: see `Trainer`.
    """
    check_writable(run)
    world = World.join(default_device())
    with locked(run) if world.is_first else nullcontext():
        _train(task, data, run, given, world, check_files)


def _train(
    task: TaskName, data: Path, run: Path, given: Mapping[str, Value], world: World, check_files: CheckFiles
) -> None:
    folder = RunFolder(run)
    is_resumed = world.first(folder.state.exists())
    stored = _stored_options(folder, task) if is_resumed else {}
    values = {**defaults_of(task), **stored, **given}
    if values["tensorboard"]:
        check_tensorboard()
    if is_resumed:
        _check_unchanged(folder, task, stored, values)

    def show(lines: Sequence[str]) -> None:
        for line in lines if world.is_first else ():
            print(line, file=sys.stderr)

    corpus = open_corpus(
        data,
        task,
        source=_text(values, "source"),
        target=_text(values, "target"),
        multi_label=bool(values.get("multi_label")),
        split_seed=int(values["split_seed"]),
    )
    facts = check_corpus(corpus)
    notes = list[str]()
    if is_resumed:
        beginning = _Beginning(read_tokenizer(folder.tokenizer), read_model_config(folder.config))
    elif _text(values, "from"):
        beginning = _start_from(task, facts, values, notes, check_files)
    else:
        beginning = _from_tokenizer(task, corpus, facts, values, notes, world, check_files)
    fields = training_fields(values)
    if is_resumed:
        fields = _resumed_fields(folder, fields, notes)
    prepared = _prepare(run, corpus, facts, beginning, values, world)
    show([*summary(prepared.facts, is_trained=bool(_text(values, "from"))), *notes])
    recipe = _recipe(prepared.facts, beginning, values, fields, corpus, world)
    _check_space(run, recipe)
    if recipe.config.max_minutes and "warmup_steps" not in fields:
        updates = _updates_in_time(task, prepared, recipe, world)
        recipe = _recipe(prepared.facts, beginning, values, fields, corpus, world, updates)
    show(recipe.reasons)
    if world.is_first:
        replace_text(run / OPTIONS_FILE, options_to_toml(task, values))
    record = read_fields(folder.record) if folder.record.exists() else {}
    details = {"learnt_share": beginning.learnt_share, **_details(corpus, prepared, values, data, record)}
    if is_resumed:
        details["learnt_share"] = record.get("learnt_share")
    trainer = Trainer(
        run,
        recipe.config,
        TASKS[task],
        prepared,
        recipe.model,
        initialise=beginning.initialise,
        details=details,
        flags=FLAGS,
    )
    trainer.fit()
    if world.is_first:  # a run that had finished before writes no record, but its license may be new
        record = read_fields(folder.record)
        replace_text(folder.record, to_json({**record, "license": details["license"]}))
    show([f"evaluate it: sightline evaluate {run}", f"export it: sightline export {run} --out bundles/{run.name}"])


def _text(values: Mapping[str, Value], name: str) -> str | None:
    """Return an option that is a text, None if it is not used."""
    return str(values.get(name, "")) or None


def _stored_options(folder: RunFolder, task: TaskName) -> dict[str, Value]:
    """Return the options of the run in a folder.

    Raises:
        UsageError: the run is of another task, or another command has started it.
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
    """Check that a resumed run has the options that it was started with.

    Raises:
        UsageError: it has others.
    """
    changed = [
        flag_name(key)
        for key, default in defaults_of(task).items()
        if FIELDS.get(key, key) not in CHANGEABLE and key != "license" and values[key] != stored.get(key, default)
    ]
    if changed:
        raise UsageError(f"{folder} contains a run with other values of {', '.join(changed)}; choose another folder")


def _resumed_fields(folder: RunFolder, given: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the settings of a resumed run: those of its folder, unless the user gave others.

    If the number of epochs changes, settings that depend on it and that the user left open are
    missing, so that they are chosen again. If the run has a limit of minutes, the distance between
    validations stays, because the time decides it.
    """
    settings = dataclasses.asdict(read_train_config(folder.settings, TrainConfig))
    fields, before, done = {**settings, **given}, settings["max_epochs"], 0
    with suppress(ValueError):  # the trainer raises the error of a damaged state
        done = load_metadata(folder.state).get("epoch", 0)
    chosen = SETTINGS_OF_LENGTH - given.keys() - ({"evaluate_epochs"} if fields["max_minutes"] else set())
    if chosen and fields["max_epochs"] != before and fields["max_epochs"] > done:
        flags = ", ".join(sorted(FLAGS[name] for name in chosen))
        notes.append(f"{flags}: chosen again, for {fields['max_epochs']} epochs instead of {before}")
        fields = {name: value for name, value in fields.items() if name not in chosen}
    return fields


def _start_from(
    task: TaskName, facts: Facts, values: Mapping[str, Value], notes: list[str], check_files: CheckFiles
) -> _Beginning:
    for name in ("tokenizer", "size", "vocab_size"):
        if values.get(name, "") not in ("", AUTO):
            raise UsageError(f"{flag_name(name)} cannot be combined with --from, which determines it; omit it")
    template = CHAT_TEMPLATE if facts.has_dialogues else None
    multi_label = bool(values.get("multi_label"))
    folder = Path(str(values["from"]))
    if folder.is_dir():
        check_files(folder, task, facts.has_dialogues)
    start = start_from(folder, task, tuple(facts.labels), multi_label=multi_label, chat_template=template)
    config = start.config
    if values["dropout"] != AUTO:
        config = dataclasses.replace(config, dropout=float(values["dropout"]))
    notes += start.notes
    return _Beginning(start.tokenizer, config, start.initialise)


def _from_tokenizer(
    task: TaskName,
    corpus: Corpus,
    facts: Facts,
    values: Mapping[str, Value],
    notes: list[str],
    world: World,
    check_files: CheckFiles,
) -> _Beginning:
    """Read the given tokenizer, or train one; all processes get that of the first."""
    special_tokens = CHAT_TOKENS if facts.has_dialogues else ()
    path = _text(values, "tokenizer")
    if path is not None:
        if not Path(path).is_file():
            raise UsageError(f"missing file {path}; name a tokenizer.json with --tokenizer")
        check_files(Path(path), task, facts.has_dialogues)
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
    text, halvings, seed = "", 0, int(values["seed"])
    if world.is_first:
        texts, halvings = learnt_texts(lambda: read_texts(corpus.train), 4 * num_characters(facts), seed)
        try:
            text = train_tokenizer(texts, int(size), special_tokens).to_str()
        except ValueError as error:
            raise UsageError(with_flags(str(error))) from None
    text, halvings = world.first((text, halvings))
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    if halvings:
        notes.append(
            f"the tokenizer is trained on about 1/{2**halvings} of the texts, chosen with the seed {seed}, because all "
            "have too many different words for the memory"
        )
    found = tokenizer.get_vocab_size()
    if found < int(size):
        notes.append(f"the vocabulary has only {found:,} tokens, because the texts have no more pairs to merge")
    return _Beginning(tokenizer, learnt_share=2.0**-halvings)


def _prepare(
    run: Path, corpus: Corpus, facts: Facts, beginning: _Beginning, values: Mapping[str, Value], world: World
) -> Prepared:
    """Encode the data in the first process; the others use the same files."""
    given = values["max_length_tokens"]
    longest = MAX_LENGTH_TOKENS if given == AUTO else int(given)
    if beginning.model is not None:
        longest = min(longest, beginning.model.max_positions)
    labels = tuple(facts.labels)
    encoder = partial(_encode, labels=labels, max_length_tokens=longest, model=beginning.model)

    def run_once() -> Prepared:
        return prepare(run, corpus, facts, beginning.tokenizer, encoder, longest)

    prepared = run_once() if world.is_first else None
    world.first(None)
    return prepared or run_once()


def _encode(
    tokenizer: Tokenizer, records: Sequence[Any], *, labels: Sequence[str], max_length_tokens: int, model: Any
) -> list[Any]:
    """Encode records for a model of this project, or for one of others.

    Raises:
        UsageError: the tokenizer or the chat template cannot encode a record.
    """
    try:
        if isinstance(model, PretrainedConfig) and model.task == "language-model":
            return encode_records(model, tokenizer, records)
        return encode(tokenizer, records, labels=labels, max_length_tokens=max_length_tokens)
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        # The library tokenizers raises only these two.
        raise UsageError(f"the tokenizer fails for a text of the data: {error}; use another tokenizer") from None


def _updates_in_time(task: TaskName, prepared: Prepared, recipe: Recipe, world: World) -> int:
    """Return how many updates `max_minutes` allow, measured with random weights."""
    config = dataclasses.replace(recipe.config, tensorboard=False)
    with TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder), config, TASKS[task], prepared, recipe.model, initialise=lambda model: None)
        _, seconds = trainer.measure_updates(3, time.monotonic)
    return int(60 * config.max_minutes / (world.first(seconds) * config.accumulate))


def _recipe(
    facts: Facts,
    beginning: _Beginning,
    values: Mapping[str, Value],
    fields: dict[str, Any],
    corpus: Corpus,
    world: World,
    updates_in_time: int | None = None,
) -> Recipe:
    """Choose the settings that the user left open.

    Raises:
        UsageError: given values contradict each other.
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
            multi_label=corpus.multi_label,
            model=beginning.model,
            start=start,  # type: ignore[arg-type]
            updates_in_time=updates_in_time,
            num_processes=world.size,
        )
    except ValueError as error:
        raise UsageError(with_flags(str(error))) from None


def _check_space(run: Path, recipe: Recipe) -> None:
    """Check that the disk has space for two states, and for the weights that a run keeps.

    The checkpoints that the folder has already count as space, because the run keeps or replaces
    them. A new state and the weights of an epoch are always written before older ones are removed.
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
    """Return facts for the record of a run that no other file of the run has.

    Args:
        corpus: files and splits.
        prepared: the encoded corpus.
        values: values of the options.
        data: path of the corpus.
        earlier: record of the run so far, whose commands are kept.
    """
    commands, command = str(earlier.get("command") or "").splitlines(), shlex.join(["sightline", *sys.argv[1:]])
    details: dict[str, Any] = {
        "command": "\n".join(commands if command in commands else [*commands, command]),
        "examples": dict(prepared.facts.examples),
        "license": _text(values, "license"),
        "data": dict(corpus.digests),
        "data_path": str(data.resolve()),
        "split_seed": corpus.split_seed,
        "summary": summary(prepared.facts, is_trained=bool(_text(values, "from"))),
    }
    if corpus.languages is not None:
        details["source"], details["target"] = corpus.languages
    if corpus.task == "classification":
        details["labels"] = dict(prepared.facts.labels)
    if corpus.task == "language-model":
        details["has_dialogues"] = prepared.facts.has_dialogues
    return details


def evaluate(arguments: argparse.Namespace) -> None:
    """Print the metrics of a checkpoint on held-out data.

    Raises:
        UsageError: the folder has no checkpoint, or the data do not belong to its task.
    """
    limit = getattr(arguments, "limit", None)
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}")
    run, checkpoint = _run_and_checkpoint(arguments.checkpoint)
    record = read_fields(run / "record.json") if (run / "record.json").is_file() else {}
    config, _ = load_parts(checkpoint)
    task = _task_of(config)
    if arguments.data is None:
        if "data_path" not in record:
            raise UsageError(f"{run} does not say which data it was trained on; name a file or folder as DATA")
        arguments.data = Path(record["data_path"])
    is_own_data = "data_path" in record and arguments.data.resolve() == Path(record["data_path"]).resolve()
    is_recorded = is_own_data and limit is None and checkpoint.name == "averaged"
    data, split = arguments.data, getattr(arguments, "split", None)
    source, target = (getattr(arguments, side, record.get(side)) for side in ("source", "target"))
    if task == "translation":
        sides = source or "en", target or "de"
        if split is not None or _has_named_split(data, sides[0]):
            report = evaluate_split(arguments, checkpoint, split, *sides)
            if is_recorded:
                _record_metrics(run, record, checkpoint, report)
            return
    if split is not None:
        raise UsageError(f"--split is for translation only; omit it for {task}")
    is_pairs = task in PAIR_TASKS
    part = _held_out(
        record,
        data,
        task,
        source=source if is_pairs else None,
        target=target if is_pairs else None,
        multi_label=getattr(config, "multi_label", False),
    )
    records = list(islice(part, limit))
    report = evaluate_checkpoint(
        checkpoint, records, num_beams=arguments.num_beams, length_penalty=arguments.length_penalty
    )
    report = {"data": str(part), "split": part.name, **report}
    print(
        json.dumps({name: value for name, value in report.items() if name != "outputs"}, indent=2, ensure_ascii=False)
    )
    if part.name == "dev":
        print(f"note: {part} also decided when the training stopped; a test set of its own is better", file=sys.stderr)
    if is_recorded:
        _record_metrics(run, record, checkpoint, report)
    if hasattr(arguments, "json"):
        write_json(arguments.json, report)


def _record_metrics(run: Path, record: dict[str, Any], checkpoint: Path, report: Mapping[str, Any]) -> None:
    """Write the metrics of a checkpoint into the record of the run, which the model card shows."""
    record["metrics"] = {**record.get("metrics", {}), report["split"]: headline(report).to_record(checkpoint.name)}
    replace_text(run / "record.json", to_json(record))


def _held_out(record: Mapping[str, Any], data: Path, task: TaskName, **options: Any) -> Split:
    """Return the records of `data` that the run was not trained on.

    Raises:
        UsageError: the run divided the data, and they have changed since.
    """
    seed = record.get("split_seed")
    if seed is None or data.resolve() != Path(record["data_path"]).resolve():
        return open_held_out(data, task, **options)
    corpus = open_corpus(data, task, split_seed=seed, **options)
    if corpus.digests != record["data"]:
        raise UsageError(
            f"{data} has changed since the training, so that its records may be those that the run was trained on; "
            "name a file of other records as DATA"
        )
    return corpus.dev if corpus.test is None else corpus.test


def _run_and_checkpoint(path: Path) -> tuple[Path, Path]:
    """Return the folder of a run and its averaged checkpoint, or that which the path names."""
    for name in ("averaged", "best"):
        if (path / name / CONFIG).is_file():
            return path, path / name
    return (path.parent if path.name in ("averaged", "best") else path), path


def _task_of(config: ModelConfig) -> TaskName:
    """Return the task of a model."""
    if isinstance(config, PretrainedConfig):
        return config.task
    return next(task for task in TASK_NAMES if architecture_of(config) in TASK_ARCHITECTURES[task])


def _has_named_split(data: Path, source: str) -> bool:
    """Return True if a folder has files named as in Multi30k, and no test files of its own."""
    if not data.is_dir() or any(data.glob("test.*")):
        return False
    names = (TEST_SPLIT, VALIDATION_SPLITS["translation"])
    return any((data / f"{name}.{source}").is_file() for name in names) or not any(data.iterdir())
