"""The check of the number of lines of each package."""

from tests.lines import excess, slack


def test_a_package_with_more_lines_than_its_entry_or_without_one_is_named() -> None:
    allowed = {"export": 10, "service": 10}
    assert not list(excess({"export": 10, "service": 9}, allowed))
    found = list(excess({"export": 11, "new": 1, "service": 10}, allowed))
    assert [sentence.partition(" has ")[0] for sentence in found] == ["export", "new"]
    assert "export has 11 lines" in found[0] and "allows 10" in found[0]


def test_an_entry_with_two_per_cent_fewer_lines_may_be_lowered() -> None:
    (found,) = slack({"export": 981, "service": 980}, {"export": 1000, "service": 1000})
    assert "service" in found and "from 1000 to 980" in found
