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
from sightline.model.config import (
    ArchitectureConfig,
    PretrainedConfig,
    TransformerConfig,
    read_fields,
    read_model_config,
)
from sightline.model.data.alignments import read_links
from sightline.model.data.chat_template import CHAT_TEMPLATE, CHAT_TOKENS
from sightline.model.data.corpus import open_corpus
from sightline.model.data.encoding import encode
from sightline.model.data.facts import CONTRADICTIONS, MAX_LISTED_TEXTS, Facts, check_corpus, summary
from sightline.model.data.formats import READING_OPTIONS, Reading
from sightline.model.data.learnt_texts import learnt_texts, read_texts
from sightline.model.data.preparation import Prepared, prepare
from sightline.model.data.records import TaskName
from sightline.model.data.similar_texts import encode_reranking, encode_similar
from sightline.model.data.teaching import with_teacher
from sightline.model.data.tokenizer_training import adapt_tokenizer, read_tokenizer, token_fields, train_tokenizer
from sightline.model.parts import PRETRAINED
from sightline.model.precision import default_device
from sightline.model.training.classification import CLASSIFICATION, TAGGING, class_weights, label_loss
from sightline.model.training.folder import RunFolder, locked
from sightline.model.training.guided import GuidedTrainer
from sightline.model.training.language_model import LANGUAGE_MODEL
from sightline.model.training.options import (
    AUTO,
    MAX_LENGTH_TOKENS,
    SETTINGS_OF_LENGTH,
    TrainOptions,
    changed_options,
    make_config,
    options_to_toml,
    read_options,
    read_train_config,
)
from sightline.model.training.recipe import Recipe, choose, choose_vocabulary, num_characters
from sightline.model.training.similarity import ENCODER, RERANKING
from sightline.model.training.start import start_from
from sightline.model.training.task import Task
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
# `sightline.model.parts`.
ReadCheckpoint: TypeAlias = Callable[
    [str, TaskName, str | None, tuple[str, str] | None], AbstractContextManager[tuple[Path, Path | None]]
]
# `Translate` with the bundle of `--teacher`, the languages of the data and a number of threads.
Teach = Callable[[Path, tuple[str, str] | None, int, Sequence[str], Path], None]
OPTIONS_FILE = "options.toml"  # in the folder of a run
NO_LORA = "--lora needs --from with a third-party checkpoint; add it, or omit --lora"
BYTES_OF_STATE = 12  # of a parameter: float32 weight and two moments of Adam
BYTES_OF_WEIGHT = 4


def train(
    given: TrainOptions,
    data: Path,
    run: Path,
    check_tokenizer: CheckTokenizer,
    read_checkpoint: ReadCheckpoint,
    teach: Teach,
) -> None:
    """Train a model on data with the options that the user gave, or resume the run. Raises
    `UsageError` for options or data that can never work, and `OSError` or `ValueError` as `Trainer`
    does.
    """
    with locked(run):
        _Preparation(given, data, run, teach).trainer(check_tokenizer, read_checkpoint).fit()
    show([f"evaluate it: sightline evaluate {run}", f"export it: sightline export {run} --out bundles/{run.name}"])


def show(lines: Sequence[str]) -> None:
    """Print lines for the user."""
    for line in lines:
        print(line, file=sys.stderr)


class _Preparation:
    """A run before its training: its options, data, tokenizer and model."""

    tokenizer: Tokenizer
    model: ArchitectureConfig | None = None  # of a checkpoint or a resumed run; otherwise, the data decide
    initialise: Callable[[nn.Module], None] | None = None
    learnt_share: float | None = None  # of the texts of train, if the tokenizer was trained on them
    files: Path | None = None  # folder of the files of a third-party checkpoint, which the run keeps

    def __init__(self, given: TrainOptions, data: Path, run: Path, teach: Teach) -> None:
        """Check the options and read the data."""
        self.folder, self.task, self.data_path = RunFolder(run), given.task, data
        self.is_resumed = self.folder.state.exists()
        self.record = read_fields(self.folder.record) if self.folder.record.exists() else {}
        self.options = self._with_stored(given) if self.is_resumed else given
        self.values = self.options.model_dump()
        # Options without those that the data decide, and with the settings of a resumed run.
        self.given = {name: value for name, value in self.values.items() if value != AUTO}
        if not self.is_resumed:
            self._check_options()
        self.notes = list[str]()  # for the user
        names = {name: self.values.get(name) or None for name in READING_OPTIONS}
        reading = Reading(self.task, **names, multi_label=self.values.get("multi_label", False))
        # `corpus` has the translations of a teacher in place of the targets of `data`.
        self.corpus = self.data = open_corpus(data, reading, self.options.split_seed)
        self.facts = check_corpus(self.corpus)
        if len(self.facts.contradictions) > MAX_LISTED_TEXTS:
            replace_text(run / CONTRADICTIONS, "".join(f"{line}\n" for line in self.facts.contradictions))
        self.special_tokens = CHAT_TOKENS if self.facts.has_dialogues else ()
        self.guide = self._guide()
        if teacher := self.values.get("teacher"):
            translate = partial(teach, Path(teacher), self.data.languages, self.values["threads"])
            self.corpus, note = with_teacher(self.data, run, None if self.is_resumed else translate)
            self.facts = check_corpus(self.corpus)
            self.notes.append(note)

    def _with_stored(self, given: TrainOptions) -> TrainOptions:
        """Return the options of a resumed run with those that may change. Raises `UsageError` for a
        run of another task, or with other options, or one that another command started.
        """
        folder, path = self.folder, self.folder.path / OPTIONS_FILE
        if not path.is_file():
            raise folder.rejected(f"without {OPTIONS_FILE} of another command")
        stored = read_options(path, given.task)
        options = stored.model_copy(update=given.model_dump(exclude_unset=True))
        folder.check_changes(changed_options(stored, options))
        return options

    def _check_options(self) -> None:
        """Raise `UsageError` for options that contradict each other, before the data are read."""
        if {"max_length_tokens", "batch_tokens"} <= self.given.keys():
            make_config(self.given)
        if self.options.from_:
            for name in ("tokenizer", "size", "vocab_size", "decoder"):
                if self.values.get(name, "") not in ("", AUTO, "transformer"):
                    raise UsageError(f"{flag_name(name)} cannot be combined with --from, which determines it; omit it")
        elif self.task == "reranking":
            raise UsageError(
                "a reranker starts from an encoder that others trained on much text; name it with --from: minilm, a "
                "folder, or OWNER/NAME of a hub"
            )
        elif self.values.get("lora"):
            raise UsageError(NO_LORA)
        elif self.options.tokenizer and not Path(self.options.tokenizer).is_file():
            raise UsageError(f"missing file {self.options.tokenizer}; name a tokenizer.json with --tokenizer")

    def _guide(self) -> Path | str | None:
        """Return the file of links to which a head is guided, `AUTO` if the model finds them, None
        if no head is guided.
        """
        guide, teacher = self.values.get("guided_alignment") or None, self.values.get("teacher")
        path = self.data.train.files[0].with_suffix(".align") if guide == AUTO else Path(guide or "")
        if guide is None or (guide == AUTO and (teacher or not path.is_file())):
            return guide
        if teacher or not path.is_file():
            problem = "aligns the targets of the data, which --teacher replaces" if teacher else "is no file"
            raise UsageError(f"{path} {problem}; use --guided-alignment auto, so that the model finds the links itself")
        return path

    def trainer(self, check_tokenizer: CheckTokenizer, read_checkpoint: ReadCheckpoint) -> Trainer:
        """Encode the data, choose the settings, and return the trainer."""
        with ExitStack() as opened:  # a checkpoint stays open until the trainer has read its weights
            self._begin(opened, check_tokenizer, read_checkpoint)
            return self._trainer()

    def _begin(self, opened: ExitStack, check_tokenizer: CheckTokenizer, read_checkpoint: ReadCheckpoint) -> None:
        """Determine the tokenizer, and the model of a resumed run or of a checkpoint."""
        if self.is_resumed:
            self.tokenizer = read_tokenizer(self.folder.tokenizer)
            self.model = read_model_config(self.folder.config)
            self.learnt_share = self.record.get("learnt_share")
        elif self.options.from_:
            template = CHAT_TEMPLATE if self.facts.has_dialogues else None
            checkpoint = read_checkpoint(self.options.from_, self.task, template, self.data.languages)
            self._start_from(*opened.enter_context(checkpoint))
        elif self.options.tokenizer:
            self.tokenizer = self._given_tokenizer(Path(self.options.tokenizer), check_tokenizer)
        else:
            self._train_tokenizer()
        if self.given.get("lora") and not isinstance(self.model, PretrainedConfig):
            raise UsageError(NO_LORA)
        if self.is_resumed:
            self._keep_settings()

    def _trainer(self) -> Trainer:
        run, prepared = self.folder.path, self._prepare()
        kind: Callable[..., Trainer] = Trainer
        if self.guide is not None:
            links = None
            if isinstance(self.guide, Path):
                links, note = read_links(self.guide, self.corpus.train, self.tokenizer, prepared.train)
                prepared = dataclasses.replace(prepared, digest=f"{prepared.digest} {links.digest()}")
                self.notes.append(note)
            kind = partial(GuidedTrainer, links=links)
        task = self._task(prepared.facts)
        show([*summary(prepared.facts, is_trained=bool(self.options.from_)), *self.notes])
        recipe = self._recipe(prepared.facts)
        self._check_space(recipe)
        if recipe.config.minutes and "warmup_steps" not in self.given:
            recipe = self._recipe(prepared.facts, self._updates_in_time(task, prepared, recipe))
        show(recipe.reasons)
        replace_text(run / OPTIONS_FILE, options_to_toml(self.options))
        if self.files is not None:
            shutil.copytree(self.files, run / PRETRAINED, dirs_exist_ok=True)
        details = self._details(prepared)
        return kind(run, recipe.config, task, prepared, recipe.model, initialise=self.initialise, details=details)

    def _keep_settings(self) -> None:
        """Give the settings of a resumed run that the user does not change.

        If the number of epochs changes, settings that depend on it and that the user left open are
        chosen again. If the run has a limit of minutes, the distance between validations stays,
        because the time decides it.
        """
        settings, done = read_train_config(self.folder.settings).model_dump(), 0
        given = {**settings, **self.given}
        with suppress(ValueError):  # the trainer raises the error of a damaged state
            done = load_metadata(self.folder.state).get("epoch", 0)
        chosen = SETTINGS_OF_LENGTH - self.given.keys() - ({"evaluate_epochs"} if given["minutes"] else set())
        if chosen and given["epochs"] != settings["epochs"] and given["epochs"] > done:
            flags = ", ".join(sorted(map(flag_name, chosen)))
            self.notes.append(f"{flags}: chosen again, for {given['epochs']} epochs instead of {settings['epochs']}")
            given = {name: value for name, value in given.items() if name not in chosen}
        self.given = given

    def _start_from(self, folder: Path, parts: Path | None) -> None:
        """Start from a checkpoint: of this project, or of others if it has `parts`."""
        labels, name = self.facts.outputs, self.options.from_
        start = start_from(folder, self.task, labels, parts, multi_label=self.values.get("multi_label", False))
        config = start.config
        if isinstance(config, TransformerConfig):
            config = dataclasses.replace(config, guided_alignment=False)  # unless this run guides it again
        elif self.guide is not None:
            raise UsageError(f"--guided-alignment trains a Transformer of this project, which {name} is not; omit it")
        if "dropout" in self.given:
            config = dataclasses.replace(config, dropout=self.given["dropout"])
        self.tokenizer, self.model, self.initialise = start.tokenizer, config, start.initialise
        family = f" ({config.family})" if isinstance(config, PretrainedConfig) else ""
        self.notes.append(f"starts from the weights of {name}{family}{start.note}")
        self.files = parts and parts / PRETRAINED

    def _given_tokenizer(self, path: Path, check_tokenizer: CheckTokenizer) -> Tokenizer:
        check_tokenizer(path)
        try:
            return adapt_tokenizer(read_tokenizer(path), self.task, self.special_tokens)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        except ValueError as error:
            raise UsageError(f"{error}; name a tokenizer.json of the library tokenizers with --tokenizer") from None

    def _train_tokenizer(self) -> None:
        size, seed = self.values["vocab_size"], self.values["seed"]
        if size == AUTO:
            size, reason = choose_vocabulary(self.facts)
            self.notes.append(reason)
        texts, halvings = learnt_texts(lambda: read_texts(self.corpus.train), 4 * num_characters(self.facts), seed)
        try:
            self.tokenizer = train_tokenizer(texts, size, self.special_tokens)
        except ValueError as error:
            raise UsageError(str(error).replace("vocab_size", "--vocab-size")) from None
        self.learnt_share = 2.0**-halvings
        if halvings:
            self.notes.append(
                f"the tokenizer is trained on about 1/{2**halvings} of the texts, chosen with the seed {seed}, because "
                "all have too many different words for the memory"
            )
        num_tokens = self.tokenizer.get_vocab_size()
        if num_tokens < size:
            self.notes.append(
                f"the vocabulary has only {num_tokens:,} tokens, because the texts have no more pairs to merge"
            )

    def _prepare(self) -> Prepared:
        longest = self.given.get("max_length_tokens", MAX_LENGTH_TOKENS)
        if self.model is not None:
            longest = min(longest, self.model.max_positions)
        encoder = partial(self._encode, max_length_tokens=longest)
        return prepare(self.folder.path, self.corpus, self.facts, self.tokenizer, encoder, longest)

    def _encode(self, tokenizer: Tokenizer, records: Sequence[Any], max_length_tokens: int) -> list[Any]:
        """Encode records for a model of this project, or for a third-party one."""
        facts = self.facts
        try:
            if self.task == "encoder":
                return encode_similar(tokenizer, records, facts.score_limits)
            if self.task == "reranking":
                return encode_reranking(tokenizer, records, facts.score_limits, max_length_tokens)
            return encode(
                tokenizer, records, model=self.model, labels=facts.outputs, max_length_tokens=max_length_tokens
            )
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            # The library tokenizers raises only these two.
            raise UsageError(f"the tokenizer fails for a text of the data: {error}; use another tokenizer") from None

    def _task(self, facts: Facts) -> Task[Any, Any]:
        """Return the task, whose loss has class weights if the user wants them."""
        task = TASKS[self.task]
        if not self.values.get("class_weights"):
            return task
        weights = class_weights(facts.labels, facts.examples["train"], multi_label=self.values["multi_label"])
        pairs = sorted(zip(weights.tolist(), facts.labels, strict=True))
        ends = [f"{weight:.2g} ({label})" for weight, label in (pairs[0], pairs[-1])]
        self.notes.append(f"class weights from {ends[0]} to {ends[1]}")
        return dataclasses.replace(task, training_loss=partial(label_loss, weights=weights))

    def _recipe(self, facts: Facts, updates_in_time: int | None = None) -> Recipe:
        """Choose the settings that the user left open."""
        given = {"precision": "bfloat16" if default_device().type == "cuda" else "float32", **self.given}
        vocabulary = token_fields(self.tokenizer) if self.model is None else {}
        return choose(facts, vocabulary, given, self.model, updates_in_time)

    def _updates_in_time(self, task: Task[Any, Any], prepared: Prepared, recipe: Recipe) -> int:
        """Return how many updates the limit of minutes allows, measured with random weights."""
        config = recipe.config
        with TemporaryDirectory() as folder:
            trainer = Trainer(Path(folder), config, task, prepared, recipe.model, initialise=lambda model: None)
            _, seconds = trainer.measure_updates(3, time.monotonic)
        return int(60 * config.minutes / (seconds * config.accumulate))

    def _check_space(self, recipe: Recipe) -> None:
        """Check that the disk has space for two states, and for the weights that a run keeps.
        Existing checkpoints count as space, because the run keeps or replaces them, but a new state
        and the weights of an epoch are always written before older ones are removed.
        """
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in build_model(recipe.model).parameters())
        kept = recipe.config.average_last + 3  # of the last epochs and the next, averaged and best
        present = sum(path.stat().st_size for path in self.folder.path.rglob("*.safetensors"))
        needed = parameters * (2 * BYTES_OF_STATE + kept * BYTES_OF_WEIGHT) - present
        needed = max(needed, parameters * (BYTES_OF_STATE + BYTES_OF_WEIGHT))
        if (free := shutil.disk_usage(self.folder.path).free) < needed:
            raise UsageError(
                f"the disk of {self.folder} has {free / 2**20:,.0f} MiB free, but new checkpoints need "
                f"{needed / 2**20:,.0f} MiB; remove files, or choose another folder for the run"
            )

    def _details(self, prepared: Prepared) -> dict[str, Any]:
        """Return facts for the record of the run that no other file of the run has."""
        corpus, facts = self.data, prepared.facts
        commands, command = str(self.record.get("command") or "").splitlines(), shlex.join(["sightline", *sys.argv[1:]])
        details: dict[str, Any] = {
            "learnt_share": self.learnt_share,
            "command": "\n".join(commands if command in commands else [*commands, command]),
            "examples": dict(facts.examples),
            "license": self.options.license or None,
            "data": dict(corpus.digests),
            "data_path": str(self.data_path.resolve()),
            "split_seed": corpus.split_seed,
            "reading": {name: value for name in READING_OPTIONS if (value := getattr(corpus.reading, name))},
            "summary": summary(facts, is_trained=bool(self.options.from_)),
        }
        if corpus.languages is not None:
            details["source"], details["target"] = corpus.languages
        if self.task in ("classification", "tagging"):
            details["labels"] = dict(facts.labels)
        if self.task == "language-model":
            details["has_dialogues"] = facts.has_dialogues
        return details
