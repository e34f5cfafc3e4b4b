import os
from pathlib import Path

import pytest

from sightline.base.machine import available_memory, resident_bytes, usable_memory, usable_threads

CORES = len(os.sched_getaffinity(0))


def test_resident_memory_is_more_than_an_interpreter_and_less_than_the_machine() -> None:
    assert 5_000_000 < resident_bytes() < usable_memory(Path("/nothing"), Path("/nothing"))


def test_without_a_quota_every_core_is_used(tmp_path: Path) -> None:
    assert usable_threads(tmp_path) == CORES
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_threads(tmp_path) == CORES


@pytest.mark.parametrize(("quota", "threads"), [(50_000, 1), (100_000, 1), (150_000, 2), (10_000_000, CORES)])
def test_a_quota_of_cgroup_v2_is_rounded_up_to_at_most_every_core(tmp_path: Path, quota: int, threads: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    assert usable_threads(tmp_path) == min(threads, CORES)


@pytest.mark.parametrize(("quota", "threads"), [(-1, CORES), (50_000, 1)])
def test_a_quota_of_cgroup_v1_applies(tmp_path: Path, quota: int, threads: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_threads(tmp_path) == threads


def test_an_invalid_file_is_no_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("lots")
    assert usable_threads(tmp_path) == CORES


INSTALLED = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_without_a_limit_all_memory_is_usable(tmp_path: Path) -> None:
    assert usable_memory(tmp_path, tmp_path / "none") == INSTALLED
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_memory(tmp_path, tmp_path / "none") == INSTALLED


def test_the_limit_of_a_container_is_read_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{600 << 20}\n")
    assert usable_memory(tmp_path, tmp_path / "none") == 600 << 20
    (tmp_path / "memory.max").write_text(f"{500 << 20}\n")
    assert usable_memory(tmp_path, tmp_path / "none") == 500 << 20


def test_a_version_1_limit_beyond_the_memory_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("9223372036854771712\n")
    assert usable_memory(tmp_path, tmp_path / "none") == INSTALLED


@pytest.mark.parametrize(("line", "controller"), [("0::/a/b", ""), ("7:cpu:/c\n9:memory:/a/b", "memory")])
def test_limits_of_the_groups_of_the_process_and_their_ancestors_apply(
    tmp_path: Path, line: str, controller: str
) -> None:
    own = tmp_path / "fs" / controller / "a" / "b"
    own.mkdir(parents=True)
    name = "memory.limit_in_bytes" if controller else "memory.max"
    (own / name).write_text(f"{400 << 20}")
    (own.parent / name).write_text(f"{300 << 20}")
    (tmp_path / "cgroup").write_text(line + "\n")
    assert usable_memory(tmp_path / "fs", tmp_path / "cgroup") == 300 << 20


def test_the_available_memory_is_less_than_that_of_the_machine_and_the_rest_of_a_container(tmp_path: Path) -> None:
    available = available_memory(tmp_path)
    assert available is not None and 0 < available < INSTALLED
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert available_memory(tmp_path) == 2000
    (tmp_path / "memory.current").write_text("6000\n")
    assert available_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert (available_memory(tmp_path) or 0) > 6000
