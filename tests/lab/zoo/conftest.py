"""Fixtures that tests of the systems share with those of the product."""

from tests.model.conftest import corpus as corpus
