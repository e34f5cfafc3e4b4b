"""Fields of configurations: their types and limits, and how they are stored as JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest value of a number, both allowed, except where `above` excludes the smallest."""

    low: float
    high: float = math.inf
    above: bool = False

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if isinstance(self.high, int):
            return f"be at least {self.low} and at most {self.high}"
        if self.high == math.inf:
            return f"be {'above' if self.above else 'at least'} {self.low:g}"
        return f"lie in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


# The types of fields. `check_fields` applies their limits wherever a configuration is made: by the command line, from a
# file or in Python.
Size: TypeAlias = Annotated[int, Limits(1, 2**20)]
Count: TypeAlias = Annotated[int, Limits(1)]
TokenId: TypeAlias = Annotated[int, Limits(0)]
Seed: TypeAlias = Annotated[int, Limits(0, 2**32 - 1)]
# Near 1 nothing is left to learn from.
Probability: TypeAlias = Annotated[float, Limits(0.0, 0.9)]
LearningRate: TypeAlias = Annotated[float, Limits(0.0, 1.0, above=True)]
Norm: TypeAlias = Annotated[float, Limits(0.0, above=True)]


def check_fields(config: Any) -> None:
    """Check each field of a dataclass against its type and its limits.

    Raises:
        ValueError: a value does not fit; the message names the field, the value and what is allowed.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise ValueError(f"{name} is {value}, it must be one of {', '.join(get_args(kind))}")
        elif get_origin(kind) is tuple:
            if type(value) is not tuple or not all(type(part) is str for part in value):
                raise ValueError(f"{name} is {value!r}, it must be a list of strings")
        elif type(value) is not kind and (kind, type(value)) != (float, int):
            raise ValueError(f"{name} is {value!r}, it must be of type {kind.__name__}")
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, it must be a finite number")
        for limits in metadata:
            if not limits.allows(value):
                raise ValueError(f"{name} is {value}, it must {limits}")


def to_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"


def read_fields(path: Path) -> dict[str, Any]:
    """Read the fields of a configuration.

    Raises:
        ValueError: the file is not a JSON object; the message names the file.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; it was cut off or edited") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not an object of settings")
    return fields


def from_fields(kind: type[Record], fields: Mapping[str, Any], path: Path) -> Record:
    """Make a configuration of the fields that were read from a file; fields that are not given have their defaults.

    Raises:
        ValueError: a field is unknown or missing, or a value is not allowed; the message names the file and the field.
    """
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(
            f"{path} has settings that this version does not know: {', '.join(unknown)}; "
            "use the version that wrote it, or remove them"
        )
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
