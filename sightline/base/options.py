"""Options of commands and of the service: models that flags, variables and TOML files fill.

Every value is a text until Pydantic checks it, so that a wrong value has the same error wherever it
was given. argparse only splits the words of a command line.
"""

import argparse
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sightline.base.errors import UsageError, did_you_mean

KINDS: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}  # in words
UNITS = {"_s": "SECONDS", "_bytes": "BYTES", "_tokens": "TOKENS"}  # by the end of a name
STATES_DEFAULT = re.compile(r"\(default|Default: ")
DEFAULT_IN_WORDS = re.compile(r" \(default: (.+)\)$", re.DOTALL)  # at the end of a description
TOML_WIDTH = 100  # of comments
MAX_SHOWN = 80  # characters of a wrong value in an error

Given: TypeAlias = Mapping[str, tuple[str, Any]]  # by the name of an option: its name for users, and its value


class Options(BaseModel):
    """Options of a command. The docstrings of a class and of its fields are its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    prefix: ClassVar[str] = ""  # of environment variables; without it, there are none
    has_file: ClassVar[bool] = False  # a TOML file can have the options
    example: ClassVar[str] = ""  # words after the name of the command
    exclusive: ClassVar[Collection[str]] = ()  # options of which only one may be given
    groups: ClassVar[Sequence[tuple[str, str]]] = ()  # the first option of each part of the help, and its title


@dataclass(frozen=True)
class Shown:
    """Form of an option on the command line, if its type and name do not show it."""

    metavar: str | tuple[str, ...] = ""  # stands for the value, or for each of several
    is_positional: bool = False
    is_repeated: bool = False  # the flag may be given several times


AnyOptions = TypeVar("AnyOptions", bound=Options)


def parse(parser: argparse.ArgumentParser, words: Sequence[str], kind: type[AnyOptions]) -> AnyOptions:
    """Return the options in the words of a command line, or end the program with an error."""
    return parse_with(parser, words, kind, kind, ())[0]


def parse_with(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    kind: type[AnyOptions],
    other: type[Options],
    names: Collection[str],
) -> tuple[AnyOptions, dict[str, Any]]:
    """Return the options in the words of a command line, and unchecked values of those of another
    class with some names, or end the program with an error.
    """
    add_options(parser, other, names)
    add_options(parser, kind)
    values = vars(parser.parse_args(words))
    try:
        return check(kind, given_flags(kind, values)), {name: values[name] for name in names if name in values}
    except UsageError as error:
        parser.error(str(error))


def add_options(parser: argparse.ArgumentParser, kind: type[Options], names: Collection[str] | None = None) -> None:
    """Add options to a parser: all with the texts of the help, or only those with some names."""
    target: Any = parser
    usage = ["%(prog)s"]
    for name, field in fields_of(kind).items():
        if names is not None and name not in names:
            continue
        shown, flag = _shown(field), flag_name(name)
        form: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(name, field)}
        value = shown.metavar or _metavar(name, field)
        for title in (title for first, title in kind.groups if first == name):
            target = parser.add_argument_group(title)
        if [hint for hint, _ in _parts(field)] == [bool]:
            is_off = field.default is False and not (kind.prefix or kind.has_file)
            action: Any = "store_true" if is_off else argparse.BooleanOptionalAction
            target.add_argument(flag, action=action, **form)
        elif shown.is_positional:
            is_many = get_origin(field.annotation) is tuple
            nargs = ("+" if is_many else None) if field.is_required() else "*" if is_many else "?"
            target.add_argument(name, metavar=value, nargs=nargs, default=argparse.SUPPRESS, help=form["help"])
            words = f"{value} ..." if is_many else str(value)
            usage.append(words if field.is_required() else f"[{words}]")
        else:
            form |= {"nargs": len(value)} if isinstance(value, tuple) else {}
            form |= {"action": "append"} if shown.is_repeated else {}
            target.add_argument(flag, metavar=value, required=field.is_required(), **form)
            usage += [flag, str(value)] if field.is_required() else []
    if names is None:
        parser.usage = parser.usage or " ".join([*usage, "[OPTION ...]"])
        parser.description = inspect.cleandoc(kind.__doc__ or "")
        example = f"example: {parser.prog} {kind.example}" if kind.example else None
        parser.epilog = "\n\n".join(filter(None, (parser.epilog, example)))


def given_flags(kind: type[Options], values: Mapping[str, Any]) -> Given:
    """Return the values that the flags of a class have."""
    fields = {name: field for name, field in fields_of(kind).items() if values.get(name) is not None}
    return {name: (_name_of(name, field), values[name]) for name, field in fields.items()}


def given_variables(kind: type[Options], environment: Mapping[str, str]) -> Given:
    """Return the values that the environment variables of a class have.

    Raises `UsageError` if no option belongs to a variable with the prefix of the class.
    """
    names = {env_name(kind, name): name for name in fields_of(kind)}
    for variable in sorted(environment):
        if variable.upper().startswith(kind.prefix) and variable not in names:
            hint = did_you_mean(variable, names) or "; the changelog names what replaced settings of earlier versions"
            raise UsageError(f"unknown setting: {variable}{hint}")
    return {name: (variable, environment[variable]) for variable, name in names.items() if variable in environment}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises `UsageError` if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also of the encoding
        raise UsageError(f"{path} is not a TOML file: {error}") from None


def given_keys(kind: type[Options], values: Mapping[str, Any], path: Path) -> Given:
    """Return the values that the keys of a file have, as the texts that a flag would have.

    Raises `UsageError` if a key is unknown.
    """
    names = {key_of(name): name for name in fields_of(kind)}
    for key in values.keys() - names.keys():
        hint = did_you_mean(key, names) or f"; the keys are {', '.join(names)}"
        raise UsageError(f"{path}: unknown key {key}{hint}")
    texts = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in values.items()}
    return {names[key]: (f"{path}: {key}", text) for key, text in texts.items()}


def to_toml(kind: type[Options], values: Mapping[str, Any]) -> str:
    """Return a TOML file with all options, of which those without a value have their defaults."""
    lines = []
    for name, field in fields_of(kind).items():
        text, default = describe(field)
        words = allowed(field)
        comment = f"{text[0].upper()}{text[1:]}{f' ({words})' if words else ''}. Default: {default}."
        lines += ["", *textwrap.wrap(comment, TOML_WIDTH, initial_indent="# ", subsequent_indent="# ")]
        # A JSON string is a basic string of TOML, unless it has DEL.
        value = json.dumps(values.get(name, field.default), ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{key_of(name)} = {value}")
    return "\n".join(lines) + "\n"


def check(kind: type[AnyOptions], *sources: Given) -> AnyOptions:
    """Return the options with the values of several sources, of which later ones have precedence.

    Raises `UsageError` if a value is not allowed, or options contradict each other.
    """
    given = {name: value for source in sources for name, value in source.items()}
    rivals = [given[name][0] for name in kind.exclusive if name in given]
    if len(rivals) > 1:
        raise UsageError(f"{rivals[0]} cannot be combined with {rivals[1]}; leave out one of them")
    values = {name: _from_text(kind.model_fields[name], value) for name, (_, value) in given.items()}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for part in error.errors():
            if part["type"] == "default_factory_not_called":
                continue  # its default follows from an option that is wrong
            # An error of the whole may begin with the name of an option.
            name = str(part["loc"][0]) if part["loc"] else part["msg"].removeprefix("Value error, ").partition(":")[0]
            problems.setdefault(name, problem(kind, part, given.get(name, (name, None))[0]))
        raise UsageError("; ".join(problems.values())) from None


def problem(kind: type[Options], error: ErrorDetails, name: str) -> str:
    """Return the message of a wrong value: the option, the allowed values, and the value."""
    if "error" in error.get("ctx", {}):  # of our own validators
        text = str(error["ctx"]["error"])
        if not error["loc"]:
            return name + text[len(text.partition(":")[0]) :]
        return f"{name} {text}" if text.startswith("must ") else f"{name}: {text}" if name else text
    field, value = kind.model_fields[str(error["loc"][0])], error["input"]
    words = allowed(field) or error["msg"].removeprefix("Input should be ")
    return f"{name} must be {words}, got {repr(value)[:MAX_SHOWN]}{did_you_mean(str(value), _choices(field))}"


def allowed(field: FieldInfo) -> str:
    """Return the allowed values of an option in words, or "" if every text is allowed."""
    texts = []
    if all(_choices_of(hint) for hint, _ in _parts(field)):
        return f"one of {', '.join(_choices(field))}"
    for hint, annotations in _parts(field):
        choices = _choices_of(hint)
        text = ", ".join(map(str, choices)) if choices else KINDS.get(hint, "")
        least, above, most = (annotations.get(limit) for limit in (Ge, Gt, Le))
        if least and most:
            text += f" from {least.ge} to {most.le}"
        elif above:
            text += f" greater than {above.gt}" + (f" and at most {most.le}" if most else "")
        elif least:
            text += f", at least {least.ge}"
        texts.append(text)
    return ", or ".join(filter(None, texts))


def describe(field: FieldInfo) -> tuple[str, str]:
    """Return the description of an option without its default, and the default in words."""
    text = field.description or ""
    if stated := DEFAULT_IN_WORDS.search(text):
        return text[: stated.start()], stated[1]
    if field.is_required() or field.default in (None, ()):
        return text, ""
    return text, str(field.default).lower() if isinstance(field.default, bool) else str(field.default) or "none"


def key_of(name: str) -> str:
    """Return the name of an option in a file; a field has `_` at its end if Python has the name."""
    return name.rstrip("_")


def fields_of(kind: type[Options]) -> dict[str, FieldInfo]:
    """Return the options of a class; fields without a description are not for users."""
    return {name: field for name, field in kind.model_fields.items() if field.description}


def flag_name(name: str) -> str:
    return f"--{key_of(name).replace('_', '-')}"


def env_name(kind: type[Options], name: str) -> str:
    return kind.prefix + name.upper()


def _parts(hint: Any, metadata: Sequence[Any] = ()) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield each type that a field allows except None, with its annotations by their class."""
    if isinstance(hint, FieldInfo):
        yield from _parts(hint.annotation, hint.metadata)
    elif get_origin(hint) is Annotated:
        yield from _parts(get_args(hint)[0], [*metadata, *get_args(hint)[1:]])
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _parts(part, metadata)
    elif hint is not NoneType:
        yield hint, {type(annotation): annotation for annotation in metadata}


def _choices_of(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _choices(field: FieldInfo) -> dict[str, Any]:
    """Return the choices of a field by their texts."""
    return {str(choice): choice for hint, _ in _parts(field) for choice in _choices_of(hint)}


def _shown(field: FieldInfo) -> Shown:
    found: Shown = next(_parts(field))[1].get(Shown, Shown())
    return found


def _name_of(name: str, field: FieldInfo) -> str:
    """Return the name of an option on the command line."""
    shown = _shown(field)
    return str(shown.metavar or name.upper()) if shown.is_positional else flag_name(name)


def _metavar(name: str, field: FieldInfo) -> str:
    if all(_choices_of(hint) for hint, _ in _parts(field)):
        return f"{{{','.join(_choices(field))}}}"
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    return unit or ("N" if next(_parts(field))[0] in (int, float) else name.rpartition("_")[2].upper())


def _help(name: str, field: FieldInfo) -> str:
    """Return the description of an option, which ends with its default."""
    text, default = field.description or "", describe(field)[1]
    default = flag_name(name) if field.default is True else default
    if default not in ("", "none", "false") and not STATES_DEFAULT.search(text):
        text += f" Default: {default}" if text.endswith(".") else f" (default: {default})"
    return text.replace("%", "%%")


def _from_text(field: FieldInfo, value: Any) -> Any:
    """Return the choice or the path that a text names; other texts are left to Pydantic.

    Raises `UnicodeEncodeError` if the text has bytes that are not UTF-8, and is no path.
    """
    if not isinstance(value, str):
        return value
    if any(hint is Path for hint, _ in _parts(field)):
        return Path(value)
    value.encode()
    return _choices(field).get(value, value)
