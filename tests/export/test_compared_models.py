"""Each family, class and generation setting is compared with Transformers by at least one test."""

import pytest
import transformers

from sightline.base.bundle import GenerationDefaults
from sightline.export.families import Family
from sightline.export.families.table import FAMILIES
from sightline.export.sources.checkpoint import Config
from sightline.export.sources.generation import read_generation
from tests.equality import test_sampling_filters
from tests.export.compared_models import compared_models
from tests.export.test_seq2seq_families import CASES


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_has_three_models_and_all_its_classes(family: Family) -> None:
    models = [model for model in compared_models() if model.family == family.name]
    assert len({model.name for model in models}) >= 3
    classes = {name for model in models for name in model.classes}
    assert {name for name in family.architectures if hasattr(transformers, name)} <= classes


def test_each_generation_setting_has_a_case() -> None:
    compared = {"do_sample", *(name for case in test_sampling_filters.CASES for name in case)}
    for case in CASES:
        config = Config(getattr(transformers, case.architecture).config_class(**case.config).to_dict(), "config.json")
        defaults = read_generation(config, Config(case.generation, "generation_config.json")).defaults
        compared |= defaults.model_dump(exclude_defaults=True).keys()
    assert compared == GenerationDefaults.model_fields.keys()
