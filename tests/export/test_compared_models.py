"""Each family, class and generation setting is compared with Transformers by at least one test."""

import pytest
import transformers

from sightline.base.bundle import GenerationDefaults
from sightline.export.families import Family
from sightline.export.families.table import FAMILIES
from sightline.export.sources.generation_settings import read_generation
from sightline.export.sources.opened_checkpoint import Config
from tests.equality import test_sampling_filters
from tests.export.test_family_options import CASES
from tests.zoo.models import MODELS


# Tests of their own compare `new` and `jina_bert`.
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name != "jina_bert"], ids=lambda family: family.name)
def test_each_family_has_three_models_and_all_its_classes(family: Family) -> None:
    models = [model for model in MODELS.values() if model.model_type == family.name]
    options = CASES[family.name]
    assert len(models) + len(options.cases) + len(options.slow_cases) >= 3
    classes = {name for model in models for name in model.architectures}
    assert {name for name in family.architectures if hasattr(transformers, name)} <= classes


def test_each_generation_setting_has_a_case() -> None:
    compared = {"do_sample", *(name for case in test_sampling_filters.CASES for name in case)}
    for model in MODELS.values():
        if model.generation:
            config = Config(model.config().to_dict(), "config.json")
            defaults = read_generation(config, Config(model.generation, "generation_config.json")).defaults
            compared |= defaults.model_dump(exclude_defaults=True).keys()
    assert compared == GenerationDefaults.model_fields.keys()
