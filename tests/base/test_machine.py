import os
from pathlib import Path

import pytest

from sightline.base.machine import available_memory, resident_bytes, usable_memory, usable_threads

CORES = len(os.sched_getaffinity(0))


def test_resident_memory_is_more_than_an_interpreter_and_less_than_the_machine() -> None:
    assert 5_000_000 < resident_bytes() < usable_memory(Path("/nothing"), Path("/nothing"))


def test_without_a_quota_every_core_is_used(tmp_path: Path) -> None:
    assert usable_threads(tmp_path, tmp_path / "none") == CORES
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_threads(tmp_path, tmp_path / "none") == CORES


@pytest.mark.parametrize(("quota", "threads"), [(50_000, 1), (100_000, 1), (150_000, 2), (10_000_000, CORES)])
def test_a_quota_of_cgroup_v2_is_rounded_up_to_at_most_every_core(tmp_path: Path, quota: int, threads: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    assert usable_threads(tmp_path, tmp_path / "none") == min(threads, CORES)


@pytest.mark.parametrize(("quota", "threads"), [(-1, CORES), (50_000, 1)])
def test_a_quota_of_cgroup_v1_applies(tmp_path: Path, quota: int, threads: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_threads(tmp_path, tmp_path / "none") == threads


def test_an_invalid_file_is_no_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("lots")
    assert usable_threads(tmp_path, tmp_path / "none") == CORES


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


@pytest.mark.parametrize(("line", "controller"), [("0::/a/b c", ""), ("7:cpu:/c\n9:memory:/a/b c", "memory")])
def test_limits_of_the_groups_of_the_process_and_their_ancestors_apply(
    tmp_path: Path, line: str, controller: str
) -> None:
    own = tmp_path / "fs" / controller / "a" / "b c"
    own.mkdir(parents=True)
    limit, used = ("limit_in_bytes", "usage_in_bytes") if controller else ("max", "current")
    (own / f"memory.{limit}").write_text(f"{400 << 20}")
    (own.parent / f"memory.{limit}").write_text(f"{300 << 20}")
    (tmp_path / "cgroup").write_text(line + "\n")
    assert usable_memory(tmp_path / "fs", tmp_path / "cgroup") == 300 << 20
    (own / f"memory.{used}").write_text(f"{399 << 20}")
    assert available_memory(tmp_path / "fs", tmp_path / "cgroup") == 1 << 20


@pytest.mark.parametrize("line", ["0::/a/ö", "4:memory:/a\n3:cpu,cpuacct:/a/ö"])
def test_quotas_of_the_groups_of_the_process_and_their_ancestors_apply(tmp_path: Path, line: str) -> None:
    own = tmp_path / "fs" / ("cpu,cpuacct" if "cpuacct" in line else "") / "a" / "ö"
    own.mkdir(parents=True)
    for folder, quota in ((own, 10_000_000), (own.parent, 50_000)):
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.max").write_text(f"{quota} 100000")
    (tmp_path / "cgroup").write_text(line + "\n", encoding="utf-8")
    assert usable_threads(tmp_path / "fs", tmp_path / "cgroup") == 1


def test_the_available_memory_is_less_than_that_of_the_machine_and_the_rest_of_a_container(tmp_path: Path) -> None:
    available = available_memory(tmp_path, tmp_path / "none")
    assert available is not None and 0 < available < INSTALLED
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert available_memory(tmp_path, tmp_path / "none") == 2000
    (tmp_path / "memory.current").write_text("6000\n")
    assert available_memory(tmp_path, tmp_path / "none") == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert (available_memory(tmp_path, tmp_path / "none") or 0) > 6000


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_cached_files_of_a_container_are_available_memory(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4800\n")
    version_1 = "cache 1\nactive_file 1\n" if prefix else ""
    totals = f"{prefix}cache 900\n{prefix}active_file 500\n{prefix}inactive_file 300\n{prefix}shmem 100\n"
    (tmp_path / "memory.stat").write_text(version_1 + totals)
    assert available_memory(tmp_path, tmp_path / "none") == 1000
