import os
from pathlib import Path

import pytest

from service.cpu import usable_threads

CORES = len(os.sched_getaffinity(0))


def test_without_a_quota_every_core_is_used(tmp_path: Path) -> None:
    assert usable_threads(tmp_path) == CORES
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_threads(tmp_path) == CORES


@pytest.mark.parametrize(("quota", "threads"), [(50_000, 1), (100_000, 1), (150_000, 2), (10_000_000, CORES)])
def test_a_quota_of_cgroup_v2_is_rounded_up_to_at_most_every_core(tmp_path: Path, quota: int, threads: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    assert usable_threads(tmp_path) == min(threads, CORES)


@pytest.mark.parametrize(("quota", "threads"), [(-1, CORES), (50_000, 1)])
def test_a_quota_of_cgroup_v1_counts_too(tmp_path: Path, quota: int, threads: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_threads(tmp_path) == threads


def test_a_file_that_makes_no_sense_is_no_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("lots")
    assert usable_threads(tmp_path) == CORES
