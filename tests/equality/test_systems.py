"""The equality tests compare all systems of the zoo, with their own configurations."""

from dataclasses import asdict

import pytest

from lab.zoo.systems import PLAN, SYSTEMS
from tests.equality import test_causal, test_classifier_served, test_recurrent_systems, test_transformer_variants
from tests.equality.systems import DEPTHS, WIDTHS, MakeConfig, full_config, without_sizes

CASES: dict[str, MakeConfig] = {
    **test_causal.SYSTEMS,
    **test_classifier_served.SYSTEMS,
    **test_recurrent_systems.SYSTEMS,
    **test_transformer_variants.SYSTEMS,
}
OF_THE_ZOO = CASES.keys() & SYSTEMS.keys()
SIZES = {*WIDTHS, *DEPTHS, "max_positions"}


@pytest.mark.parametrize("name", PLAN)
def test_every_system_is_compared_under_its_name_or_that_of_one_with_the_same_configuration(name: str) -> None:
    assert without_sizes(full_config(name)) in [without_sizes(full_config(other)) for other in OF_THE_ZOO]


@pytest.mark.parametrize("name", sorted(OF_THE_ZOO))
def test_a_case_that_is_named_after_a_system_differs_from_it_in_sizes_alone(name: str) -> None:
    full = full_config(name)
    case = CASES[name](full.vocab_size)
    assert type(case) is type(full)
    assert {field for field, value in asdict(full).items() if getattr(case, field) != value} <= SIZES
