from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sightline.model.data.examples import DiskExamples, Example, ExampleWriter, MemoryExamples

LISTS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
EXAMPLES = st.lists(st.tuples(LISTS, LISTS), max_size=8)


def write(folder: Path, examples: Sequence[Example], *, cuts: Sequence[int] = ()) -> str:
    """Write examples with one call of `add` for the examples between two cuts."""
    with ExampleWriter(folder, "train") as writer:
        for start, end in zip([0, *cuts], [*cuts, len(examples)], strict=True):
            writer.add(examples[start:end])
    return writer.digest()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(EXAMPLES, st.integers(0, 8))
def test_examples_on_disk_equal_those_in_memory(tmp_path: Path, examples: list[Example], cut: int) -> None:
    digest = write(tmp_path, examples, cuts=[min(cut, len(examples))])
    in_memory, on_disk = MemoryExamples(examples), DiskExamples(tmp_path, "train")
    assert len(on_disk) == len(in_memory) == len(examples)
    assert [on_disk[index] for index in range(len(on_disk))] == [in_memory[index] for index in range(len(in_memory))]
    np.testing.assert_array_equal(on_disk.lengths, in_memory.lengths)
    assert on_disk.lengths.dtype == in_memory.lengths.dtype == np.int32
    for index in range(len(on_disk)):
        assert all(type(part) is list and all(type(value) is int for value in part) for part in on_disk[index])
    assert write(tmp_path, examples) == digest


@pytest.mark.parametrize(
    "other", [[([1], [2, 3]), ([4], [])], [([1, 2], [3]), ([4], [5])], [([1, 2], [3])], [([4], []), ([1, 2], [3])]]
)
def test_digests_of_different_examples_differ(tmp_path: Path, other: list[Example]) -> None:
    assert write(tmp_path, [([1, 2], [3]), ([4], [])]) != write(tmp_path, other)


def test_values_of_more_than_four_bytes_are_errors(tmp_path: Path) -> None:
    with pytest.raises(OverflowError):
        write(tmp_path, [([2**31], [])])


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_out_of_range_is_an_error(tmp_path: Path, index: int) -> None:
    write(tmp_path, [([1], []), ([2], [])])
    with pytest.raises(IndexError, match=f"index must be between 0 and 1, got {index}"):
        DiskExamples(tmp_path, "train")[index]


@pytest.mark.parametrize("file", ["values", "lengths"])
def test_damaged_files_are_errors(tmp_path: Path, file: str) -> None:
    write(tmp_path, [([1, 2], [3]), ([4], [5, 6])])
    path = tmp_path / f"train.{file}"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="do not belong together"):
        DiskExamples(tmp_path, "train")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        DiskExamples(tmp_path, "train")
