"""Options of a training: values of the command line and of configuration files."""

import argparse
import tomllib
from pathlib import Path

import pytest

from sightline.base.errors import UsageError
from sightline.export.options import languages_of
from sightline.model.data.records import TASK_NAMES, TaskName
from sightline.model.training.config import TrainConfig
from sightline.model.training.options import (
    AUTO,
    OPTIONS,
    add_options,
    given_options,
    options_of,
    options_to_toml,
    read_options,
    read_task,
    training_fields,
)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_written_file_has_every_option_and_is_read_again(task: TaskName, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(options_to_toml(task, {"dropout": 0.25, "license": 'a "b"\x7f ß'}), encoding="utf-8")
    assert tomllib.loads(path.read_text(encoding="utf-8")).keys() == {"task", *options_of(task)}
    defaults = {name: option.default for name, option in options_of(task).items()}
    assert read_options(path, task) == {**defaults, "dropout": 0.25, "license": 'a "b"\x7f ß'}
    assert read_task(path) == task


def test_every_option_is_explained_in_one_line_above_it() -> None:
    lines = options_to_toml("translation", {}).splitlines()
    for option in options_of("translation").values():
        index = next(i for i, line in enumerate(lines) if line.startswith(f"{option.name} = "))
        assert (
            lines[index - 1].startswith("# ") and lines[index - 1].endswith(f"Default: {option.shown_default}.")
        ) or ("default" in " ".join(lines[index - 3 : index]).lower())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dropout = 1", "options.toml: dropout must be a number, at least 0 and at most 0.9, or auto, got 1.0"),
        ('epochs = "many"', 'epochs must be a whole number, at least 1, or auto, got "many"'),
        ("epochs = true", "epochs must be a whole number, at least 1, or auto, got true"),
        ("epochs = 2.5", "epochs must be a whole number"),
        ("dropout = nan", "dropout must be a number"),
        ('size = "huge"', 'size must be one of auto, tiny, small, base, got "huge"'),
        ("tensorboard = 1", "tensorboard must be true or false, got 1"),
        ('seed = "auto"', 'seed must be a whole number, between 0 and 4294967295, got "auto"'),
        ("epoch = 3", "unknown key epoch; the keys of translation are task, source, target"),
        ("multi_label = true", "unknown key multi_label"),
        ('task = "encoder"', 'is for the task "encoder", not translation; use a file of this task'),
        ("epochs = ", "is not a TOML file"),
        ('source = "e n"', "source must be a BCP 47 tag such as en, de-CH, zh-Hans or x-mine"),
        ('source = "x"', "source must be a BCP 47 tag"),
        ('source = "deutsch"', "source must be a BCP 47 tag"),  # which the export would refuse
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_allowed_values(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        read_options(path, "translation")
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("tag", ["", "en", "gsw", "zh-Hans", "sl-rozaj-1994", "x-elvish", "en-x-mine", "EN", "De-de"])
def test_languages_are_tags_that_a_bundle_can_have(tag: str, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(f'source = "{tag}"\n', encoding="utf-8")
    assert read_options(path, "translation") == {"source": tag}
    assert not tag or languages_of((tag, "fr")).sources[0].lower() == tag.lower()
    path.write_text('source = "question"\n', encoding="utf-8")
    assert read_options(path, "encoder") == {"source": "question"}  # only an ending


def test_a_translation_starts_only_from_a_run() -> None:
    texts = {task: options_of(task)["from"].text for task in TASK_NAMES}
    assert texts.pop("translation") == "start from the weights of a run"
    assert set(texts.values()) == {"start from the weights of a run, or of a checkpoint of others in a folder"}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing file .*--print-config"):
        read_options(tmp_path / "none.toml", "encoder")


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text("epochs = 3\nseed = 7\n", encoding="utf-8")
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    add_options(parser, "classification")
    arguments = parser.parse_args(["--config", str(path), "--epochs", "5", "--multi-label", "--learning-rate", "auto"])
    given = given_options(arguments, "classification")
    assert given == {"epochs": 5, "seed": 7, "multi_label": True, "learning_rate": AUTO}
    assert training_fields(given) == {"max_epochs": 5, "seed": 7}


def test_options_without_auto_have_the_defaults_of_the_settings() -> None:
    for option in OPTIONS:
        if option.field and option.default != AUTO and option.name != "clip_norm":
            assert getattr(TrainConfig, option.field) == option.default, option.name


def test_the_help_names_the_default_of_every_option() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "translation")
    text = " ".join(parser.format_help().split())
    for option in options_of("translation").values():
        assert option.flag in text
        assert f"(default: {option.shown_default})" in text
