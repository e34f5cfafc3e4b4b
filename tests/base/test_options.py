"""Options: a line for each mistake of a user, and the texts of the help."""

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, Field, model_validator

from sightline.base.errors import UsageError
from sightline.base.options import Options, Shown, check, given_flags, given_variables, parse
from sightline.base.parser import Parser
from tests.support.tables import read_table


def _text_file(path: Path) -> Path:
    if path.suffix != ".txt":
        raise ValueError(f"must be a .txt file, got {path}")
    return path


class Example(Options):
    """Do something.

    It is 100 % safe.
    """

    prefix = "EXAMPLE_"
    example = "folder --out x"
    exclusive = ("data", "texts")
    groups = (("data", "measuring"),)

    bundle: Annotated[Path, Shown(is_positional=True)]
    """folder of a bundle"""
    out: Annotated[Path, Shown("FOLDER")]
    """folder to write"""
    kind: Literal["gguf", "huggingface"] | None = None
    """kind of the checkpoint (default: recognised by its files)"""
    bits: Literal[8, 4, 32] = 8
    """bits per weight"""
    max_tokens: Annotated[int | None, Ge(1)] = None
    """longest sequence"""
    beams: Annotated[int, Ge(1), Le(8)] = 1
    """Beams, less than 100 %."""
    endpoint: Literal["generate", "encode"] = Field("generate", description="one of 2 endpoints")
    timeout_s: Annotated[float, Gt(0)] = 5.0
    """Seconds of a request."""
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    """share of the data"""
    epochs: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    """most passes"""
    page: bool = True
    """Serve the page."""
    languages: Annotated[tuple[str, str] | None, Shown(("SOURCE", "TARGET"))] = None
    """two languages"""
    label: Annotated[tuple[str, ...], Shown("NAME", is_repeated=True)] = ()
    """a label; repeat for several"""
    data: Annotated[Path | None, Shown("FOLDER")] = None
    """folder of text"""
    texts: Annotated[Path | None, AfterValidator(lambda path: path and _text_file(path)), Shown("FILE")] = None
    """file of text"""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.bits == 32 and self.beams > 4:
            raise ValueError("--bits 32 allows at most --beams 4")
        return self


class Switches(Options):
    """Do it."""

    force: bool = False
    """do it anyway"""


def parser() -> Parser:
    return Parser(prog="sightline example", allow_abbrev=False)


MISTAKES = read_table(__file__)


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(parser(), ["folder", "--out", "x", *shlex.split(words)], Example)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {message}; see `sightline example --help`\n"


@pytest.mark.parametrize(
    ("words", "missing"), [("", "BUNDLE, --out"), ("folder", "--out"), ("--out x", "BUNDLE")], ids=str
)
def test_missing_options_are_named(words: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(parser(), words.split(), Example)
    assert capsys.readouterr().err.startswith(f"error: the following arguments are required: {missing};")


def test_a_switch_that_is_off_has_no_opposite(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(parser(), ["--force"], Switches).force and not parse(parser(), [], Switches).force
    with pytest.raises(SystemExit):
        parse(parser(), ["--force", "true"], Switches)
    assert "unrecognized arguments: true;" in capsys.readouterr().err


def test_words_become_values() -> None:
    words = "folder --out x --bits 4 --no-page --languages en de --label a --label b --epochs 3 --endpoint encode"
    options = parse(parser(), words.split(), Example)
    assert (options.bundle, options.bits, options.page, options.epochs) == (Path("folder"), 4, False, 3)
    assert (options.languages, options.label, options.endpoint) == (("en", "de"), ("a", "b"), "encode")
    assert (options.kind, options.max_tokens, options.timeout_s) == (None, None, 5.0)


def test_a_later_source_has_precedence_and_an_error_names_its_source() -> None:
    variables = given_variables(
        Example, {"EXAMPLE_BITS": "4", "EXAMPLE_BEAMS": "9", "EXAMPLE_PAGE": "false", "HOME": "/"}
    )
    flags = given_flags(Example, {"bundle": "a", "out": "b", "beams": "2"})
    options = check(Example, variables, flags)
    assert (options.bits, options.beams, options.page) == (4, 2, False)
    with pytest.raises(UsageError, match=r"^EXAMPLE_BEAMS must be a whole number from 1 to 8, got '9'$"):
        check(Example, flags, variables)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("EXAMPLE_BIT", " (did you mean EXAMPLE_BITS?)"),
        ("example_bits", "; the changelog names what replaced settings of earlier versions"),
        ("EXAMPLE_", " (did you mean EXAMPLE_OUT?)"),
    ],
)
def test_an_unknown_variable_is_named(variable: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        given_variables(Example, {variable: "1"})
    assert str(error.value) == f"unknown setting: {variable}{hint}"


def test_a_path_may_have_bytes_that_are_not_utf_8_and_a_text_may_not() -> None:
    assert parse(parser(), ["caf\udce9", "--out", "x"], Example).bundle == Path("caf\udce9")
    with pytest.raises(UnicodeEncodeError):
        parse(parser(), ["folder", "--out", "x", "--kind", "caf\udce9"], Example)


def test_the_help_has_kinds_units_choices_and_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        parse(parser(), ["--help"], Example)
    text = capsys.readouterr().out
    usage, description, *_, example = text.strip().split("\n\n")
    assert usage == "usage: sightline example BUNDLE --out FOLDER [OPTION ...]"
    assert description == "Do something." and "\nIt is 100 % safe.\n" in text
    assert example == "example: sightline example folder --out x"
    words = " ".join(text.split())
    for line in (
        "--kind {gguf,huggingface} kind of the checkpoint (default: recognised by its files) --bits",
        "--bits {8,4,32} bits per weight (default: 8)",
        "--max-tokens TOKENS longest sequence --beams",
        "--beams N Beams, less than 100 %. Default: 1",
        "--endpoint {generate,encode} one of 2 endpoints (default: generate)",
        "--timeout-s SECONDS Seconds of a request. Default: 5.0",
        "--page, --no-page Serve the page. Default: --page",
        "--languages SOURCE TARGET two languages",
        "--label NAME a label; repeat for several",
        "measuring: --data FOLDER folder of text",
    ):
        assert line in words
