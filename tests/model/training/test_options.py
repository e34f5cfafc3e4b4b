"""Options of a training: values of the command line and of configuration files."""

import tomllib
from pathlib import Path

import pytest

from sightline.base.errors import UsageError
from sightline.base.options import check, describe, given_flags, key_of
from sightline.export.options import languages_of
from sightline.model.data.records import TASK_NAMES, TaskName
from sightline.model.training.options import (
    AUTO,
    OPTIONS,
    TrainConfig,
    make_config,
    options_to_toml,
    read_keys,
    read_options,
    read_train_config,
)
from tests.support.tables import read_table


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_written_file_has_every_option_and_is_read_again(task: TaskName, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    options = OPTIONS[task](dropout=0.25, license='a "b"\x7f ß')
    path.write_text(options_to_toml(options), encoding="utf-8")
    assert tomllib.loads(path.read_text(encoding="utf-8")).keys() == {"task", *map(key_of, OPTIONS[task].model_fields)}
    assert read_options(path, task) == options


def test_every_option_is_explained_in_lines_above_it() -> None:
    parts = options_to_toml(OPTIONS["translation"]()).split("\n\n")
    for name, field in OPTIONS["translation"].model_fields.items():
        (part,) = (part for part in parts if part.splitlines()[-1].startswith(f"{key_of(name)} = "))
        comment = " ".join(line.removeprefix("# ") for line in part.splitlines()[:-1])
        assert comment.endswith(f" Default: {' '.join(describe(field)[1].split())}.")


@pytest.mark.parametrize(("text", "message"), read_table(__file__))
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
    assert read_options(path, "translation").model_dump(exclude_unset=True) == {"source": tag}
    assert not tag or languages_of((tag, "fr")).sources[0].lower() == tag.lower()
    path.write_text('source = "question"\n', encoding="utf-8")
    assert read_options(path, "encoder").model_dump(exclude_unset=True) == {"source": "question"}  # only an ending


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing file .*--print-config"):
        read_options(tmp_path / "none.toml", "encoder")


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text("epochs = 3\nseed = 7\n", encoding="utf-8")
    kind = OPTIONS["classification"]
    flags = given_flags(kind, {"epochs": "5", "multi_label": True, "learning_rate": "auto"})
    given = check(kind, read_keys(path, "classification"), flags).model_dump(exclude_unset=True)
    assert given == {"epochs": 5, "seed": 7, "multi_label": True, "learning_rate": AUTO}
    assert make_config(given) == TrainConfig(epochs=5, seed=7)


@pytest.mark.parametrize("text", ["-1", "0", "0.5", "2", "nan"])
def test_an_option_allows_what_its_setting_allows(text: str, tmp_path: Path) -> None:
    for name in TrainConfig.model_fields.keys() & OPTIONS["encoder"].model_fields.keys():
        allowed = list[bool]()
        for read, path, content in (
            (read_train_config, tmp_path / "train.json", f'{{"{name}": {text.replace("nan", "NaN")}}}'),
            (lambda path: read_options(path, "encoder"), tmp_path / "options.toml", f"{name} = {text}"),
        ):
            path.write_text(content, encoding="utf-8")
            try:
                read(path)
            except ValueError as error:
                allowed.append("must be at most --batch-tokens" in str(error))  # a contradiction of two settings
            else:
                allowed.append(True)
        assert len(set(allowed)) == 1, (name, text)
