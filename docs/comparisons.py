"""Rows of the tables that tell what the tests compare with Transformers.

They come from the cases of the tests, which also check that no family, option or setting lacks one.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sightline.export.families.values import ACTIVATIONS
from tests.equality import test_sampling_filters
from tests.export.test_family_options import CASES, WITHOUT_EFFECT, flat, make_config
from tests.zoo.models import MODELS

Row = tuple[str, str, str]
# Options of each kind of layer have one row, and so have the names of Transformers 4 and 5.
_LAYERS = re.compile(r"\b(?:full|sliding)_attention\.")
_OLD_NAMES = {"rope_scaling.": "rope_parameters.", "rope_parameters.type": "rope_parameters.rope_type"}
_ABSENT = object()
_NO_OPTIONS = WITHOUT_EFFECT | {"model_type"}


def option_rows() -> Iterator[tuple[str, str]]:
    """Return for each group of families the options that it shares, with their names of values."""
    values = defaultdict[str, dict[str, set[str]]](dict)  # by key and family
    for name, family in CASES.items():
        first = _options(make_config(family, {}).to_dict())
        for case in (*family.cases, *family.slow_cases):
            edits = {key: _ABSENT if value is None else value for key, value in case.edits.items()}
            for key, case_values in _options({**case.changes, **edits}).items():
                values[key].setdefault(name, set(first.get(key, ()))).update(case_values)
    rows = defaultdict[tuple[str, ...], list[str]](list)  # by families
    for key in sorted(values, key=lambda key: key.lstrip("_")):
        families = defaultdict[tuple[str, ...], list[str]](list)  # by the values that they share
        for name, own in values[key].items():
            families[tuple(sorted(value for value in own if value.startswith('"')))].append(name)
        for shared, names in families.items():
            rows[tuple(names)].append(f"`{key}`" + (f" ({names_of(shared)})" if shared else ""))
    return ((names_of(names), ", ".join(options)) for names, options in rows.items())


def _options(values: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the values of each option as JSON."""
    options = defaultdict[str, set[str]](set)
    for path, value in flat(values).items():
        key = _LAYERS.sub("", path)
        for old, new in _OLD_NAMES.items():
            key = key.replace(old, new)
        if key not in _NO_OPTIONS:
            options[key].add("[…]" if isinstance(value, list) else "absent" if value is _ABSENT else json.dumps(value))
    return options


def activation_rows() -> Iterator[tuple[str, str]]:
    """Yield the names of each activation in `config.json`."""
    names = defaultdict[str, list[str]](list)
    for name, function in ACTIVATIONS.items():
        names[function].append(name)
    return ((f"`{function}`", names_of(own)) for function, own in names.items())


def generation_settings() -> set[str]:
    """Return the settings of the generation with which a model is compared."""
    settings = (model.generation for model in MODELS.values())
    return set[str]().union(*settings, *test_sampling_filters.CASES)


def names_of(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
