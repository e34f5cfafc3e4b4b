"""`sightline draw` with a toy bundle."""

import html
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline.__main__ import main
from sightline.base.bundle_files import read_manifest, write_manifest

TEXT = "Two girls are playing."
Draw = Callable[..., tuple[int, str, str, str]]


@pytest.fixture
def drawn(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Draw:
    """A function that draws and returns the exit code, the output, the errors and the picture."""

    def run(*arguments: str, text: str = TEXT, out: str = "picture.svg") -> tuple[int, str, str, str]:
        path = tmp_path / out
        path.unlink(missing_ok=True)
        where = [] if "--bundle" in arguments or "--bundles" in arguments else ["--bundle", str(bundle)]
        code = main(["draw", text, "--out", str(path), *where, *arguments])
        output, errors = capsys.readouterr()
        return code, output, errors, path.read_text(encoding="utf-8") if path.exists() else ""

    return run


def texts(svg: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r">([^<]+)</text>", svg)]


def test_it_prints_the_output_and_draws_cross_attention_between_words(drawn: Draw) -> None:
    code, output, errors, picture = drawn()
    assert (code, errors) == (0, "")
    assert re.fullmatch(r"toy: Cross-attention, layer \d, .*", texts(picture)[0])
    assert {"Two", "girls", "are", "playing"} <= set(texts(picture))
    assert output.strip()


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (["--kind", "encoder"], "toy: Encoder self-attention, layer 1, mean of 4 heads"),
        (["--kind", "decoder", "--layer", "0", "--head", "2"], "toy: Decoder self-attention, layer 0, head 2"),
        (["--layer", "-1", "--head", "-1", "--view", "alignment"], "toy: Cross-attention, layer 1, head 3"),
        (["--view", "heads"], "toy: Cross-attention"),
    ],
)
def test_options_choose_the_view_the_kind_the_layer_and_the_head(drawn: Draw, arguments: list[str], title: str) -> None:
    code, _, errors, picture = drawn(*arguments)
    assert (code, errors) == (0, "")
    assert texts(picture)[0] == title


def test_a_given_target_is_read_instead_of_generated(drawn: Draw) -> None:
    code, output, _, picture = drawn("--target", "A boy waits.", "--units", "tokens")
    assert (code, output) == (0, "A boy waits.\n")
    assert "</s>" in texts(picture)


@pytest.mark.parametrize("index", ["9" * 20, "1000", "-x", ""])
def test_an_index_that_is_no_small_number_is_wrong_usage(
    drawn: Draw, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        drawn(f"--layer={index}")
    assert ended.value.code == 2
    assert f"--layer must be a whole number from -999 to 999, got {index!r};" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layer", "7"], 2, "error: --layer must be from -2 to 1 for cross attention, got 7."),
        (["--kind", "encoder_slots"], 2, "error: --kind: toy has no attention maps of kind encoder_slots"),
        (["--bundle", "missing"], 2, "missing is not a bundle"),
        (["--target", " "], 2, "error: --target is blank; give the text that the model reads as its output, or leave"),
    ],
)
def test_errors_are_one_line(drawn: Draw, arguments: list[str], code: int, message: str) -> None:
    found, _, errors, picture = drawn(*arguments)
    assert (found, picture, errors.count("\n")) == (code, "", 1)
    assert message in errors


def test_an_empty_text_is_an_error(drawn: Draw) -> None:
    code, _, errors, _ = drawn(text=" ")
    assert (code, errors) == (2, "error: TEXT is blank; give the text that the model reads\n")


def test_another_kind_of_file_is_an_error(drawn: Draw) -> None:
    with pytest.raises(SystemExit):
        drawn(out="picture.png")


def test_without_a_bundle_the_first_with_attention_is_used(drawn: Draw, bundle: Path, tmp_path: Path) -> None:
    code, _, _, picture = drawn("--bundles", str(bundle.parent))
    assert code == 0 and texts(picture)[0].startswith("toy: ")


def test_lazy_models_are_drawn_too(drawn: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGHTLINE_LAZY_MODELS", "*")
    assert drawn()[0] == 0


def test_a_model_without_attention_is_an_error(drawn: Draw, bundle: Path, tmp_path: Path) -> None:
    only = tmp_path / "toy"
    shutil.copytree(bundle, only)
    write_manifest(only, read_manifest(only).model_copy(update={"attention": (), "alignment": None, "coverage": None}))
    code, _, errors, _ = drawn("--bundle", str(only))
    assert code == 2 and errors.startswith(f"error: {only} has no attention maps; its tasks are ")
