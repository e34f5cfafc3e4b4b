"""Types and limits of configuration fields, and their JSON representation."""

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
class Range:
    """Range of a number, with both ends unless `exclusive_low` excludes the lower one."""

    low: float
    high: float = math.inf
    exclusive_low: bool = False

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.exclusive_low and value == self.low)

    def __str__(self) -> str:
        if isinstance(self.high, int):
            return f"be between {self.low} and {self.high}"
        if self.high == math.inf:
            return f"be {'greater than' if self.exclusive_low else 'at least'} {self.low:g}"
        return f"be {'greater than' if self.exclusive_low else 'at least'} {self.low:g} and at most {self.high:g}"


# Types of fields. `check_fields` enforces their limits whenever a configuration is created.
Size: TypeAlias = Annotated[int, Range(1, 2**20)]
Count: TypeAlias = Annotated[int, Range(1)]
Limit: TypeAlias = Annotated[int, Range(0)]  # 0 means no limit, or a default
Minutes: TypeAlias = Annotated[float, Range(0.0)]
TokenId: TypeAlias = Annotated[int, Range(0)]
Seed: TypeAlias = Annotated[int, Range(0, 2**32 - 1)]
# A dropout near 1 would leave nothing to learn from.
Probability: TypeAlias = Annotated[float, Range(0.0, 0.9)]
LearningRate: TypeAlias = Annotated[float, Range(0.0, 1.0, exclusive_low=True)]
Norm: TypeAlias = Annotated[float, Range(0.0, exclusive_low=True)]


def check_fields(config: Any) -> None:
    """Check each field of a dataclass against its type and its limits. Raises `ValueError` with the
    field, the limit and the value.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value}")
        elif get_origin(kind) is tuple:
            part_type = get_args(kind)[0]
            if type(value) is not tuple or not all(type(part) is part_type for part in value):
                named = "strings" if part_type is str else "whole numbers"
                raise ValueError(f"{name} must be a list of {named}, got {value!r}")
        elif get_origin(kind) is dict:
            if type(value) is not dict:
                raise ValueError(f"{name} must be an object, got {value!r}")
        elif type(value) is not kind and (kind, type(value)) != (float, int):
            raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
        for limits in metadata:
            if not limits.allows(value):
                raise ValueError(f"{name} must {limits}, got {value}")


def to_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"


def read_fields(path: Path) -> dict[str, Any]:
    """Read the JSON object of a configuration. Raises `ValueError` if the file has none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; the file may be truncated") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return fields


def from_fields(kind: type[Record], fields: Mapping[str, Any], path: Path) -> Record:
    """Create a configuration from fields read from a file; missing fields get their defaults.
    Raises `ValueError` that names the file and the field.
    """
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(
            f"{path} has unknown fields: {', '.join(unknown)}; remove them, or use the version of Sightline that "
            "wrote the file"
        )
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields]
    if missing:
        raise ValueError(f"{path} lacks the required fields {', '.join(missing)}")
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
