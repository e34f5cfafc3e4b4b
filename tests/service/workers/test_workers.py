"""A service with several workers is one service from outside."""

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sightline.base.errors import UsageError
from sightline.service.keys import Quota, add_key
from sightline.service.metrics import SHARED_SETTINGS
from sightline.service.settings import Settings, make_settings
from sightline.service.workers import shares
from sightline.service.workers.shares import max_workers, share_of
from tests.service.conftest import wait_until
from tests.service.workers.conftest import Load, Run, WorkerService, copy_bundle
from tests.support.tables import read_table

GENERATE = {"inputs": "A man sleeps.", "parameters": {"max_new_tokens": 8}}


@pytest.fixture(scope="module")
def two(run: Run) -> Iterator[WorkerService]:
    """A service with two workers and two models, which is not changed for good."""
    with run(copies=("one", "two"), default_model="one", model_control="explicit", lazy_models="two") as service:
        service.wait_ready()
        yield service


def test_every_worker_gives_the_same_bits_and_says_so_in_its_log_lines(two: WorkerService) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(contextlib.closing(two.connect())) for _ in range(8)]
        before = len(two.logged("request"))
        responses = []
        for one in connections:
            status, body = two.ask("/v1/generate", GENERATE, one)
            assert status == 200
            responses.append(json.dumps(body["outputs"]))
        assert len(set(responses)) == 1
        wait_until(lambda: len(two.logged("request")) >= before + 8)
    lines = two.logged("request")[before:]
    # A new connection goes to the worker with the fewest. An earlier one may not have ended yet.
    assert 3 <= [line["worker"] for line in lines].count(1) <= 5
    assert len({line["request_id"] for line in lines}) == 8


def test_metrics_and_statistics_are_those_of_all_workers(two: WorkerService) -> None:
    def counts() -> tuple[float, float, int]:
        stats = two.ask("/v2/models/one/stats")[1]["model_stats"][0]
        return (
            two.metric('sightline_http_requests_total{route="/v1/generate",status="200"}'),
            two.metric('sightline_engine_step_seconds_count{model_name="one"}'),
            stats["inference_count"],
        )

    before = counts()
    with contextlib.ExitStack() as stack:
        for one in [stack.enter_context(contextlib.closing(two.connect())) for _ in range(4)]:
            assert two.ask("/v1/generate", GENERATE, one)[0] == 200
    after = counts()
    assert (after[0] - before[0], after[2] - before[2]) == (4, 4)
    assert after[1] > before[1]
    assert two.metric("sightline_build_info") == 1
    assert two.metric('sightline_limit{setting="max_waiting_sequences"}') == 256
    assert two.metric('sightline_limit{setting="max_connections"}') == 2048
    assert (two.metric("sightline_workers "), two.metric("sightline_workers_failed ")) == (2, 0)
    with contextlib.closing(two.connect()):
        wait_until(lambda: two.metric("sightline_connections ") >= 2)
    pages = [two.ask("/metrics")[1] for _ in range(2)]
    assert [page.count("# TYPE") for page in pages] == [page.count("# HELP") for page in pages]


def states(service: WorkerService) -> list[dict[str, str]]:
    """Return what four connections are told of the models."""
    documents = [service.ask("/v1/models")[1]["data"] for _ in range(4)]
    return [{model["id"]: model["state"] for model in data} for data in documents]


def test_the_first_use_of_a_lazy_model_loads_it_in_all_workers(two: WorkerService) -> None:
    assert states(two) == [{"one": "ready", "two": "unloaded"}] * 4
    assert two.ask("/v1/generate", {**GENERATE, "model": "two"})[0] == 200
    assert states(two) == [{"one": "ready", "two": "ready"}] * 4


def change(service: WorkerService, verb: str, name: str) -> tuple[int, Any]:
    return service.ask(f"/v2/repository/models/{name}/{verb}", {})


def test_a_change_of_a_model_reaches_all_workers_before_the_call_returns(two: WorkerService) -> None:
    for verb, expected in (("unload", ["one"]), ("load", ["one", "two"])):
        assert change(two, verb, "two")[0] == 200
        assert [sorted(state) for state in states(two)] == [expected] * 4
    assert change(two, "load", "nobody")[0] == change(two, "unload", "nobody")[0] == 404


def test_a_model_that_cannot_be_loaded_is_loaded_by_no_worker(two: WorkerService, bundle: Path) -> None:
    copy_bundle(bundle, two.folder, "broken")
    weights = next(path for path in (two.folder / "broken").iterdir() if path.suffix not in {".json", ".md"})
    weights.write_bytes(b"damaged")
    status, body = change(two, "load", "broken")
    assert (status, body["error"]) == (500, "broken failed to load; the log has the reason.")
    assert all("broken" not in state for state in states(two))
    # Another change is not blocked by the failed one.
    assert change(two, "unload", "two")[0] == change(two, "load", "two")[0] == 200


def test_a_bundle_that_only_one_worker_can_load_is_loaded_by_none(two: WorkerService, bundle: Path) -> None:
    copy_bundle(bundle, two.folder, "late")
    stopped = two.workers[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        results: list[tuple[int, Any]] = []
        # One of two connections is that of the worker that is stopped.
        connections = [two.connect() for _ in range(2)]
        threads = [
            threading.Thread(target=lambda one=one: results.append(two.ask("/v2/repository/models/late/load", {}, one)))
            for one in connections
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: bool(two.logged("loaded late")))
        weights = next(path for path in (two.folder / "late").iterdir() if path.suffix not in {".json", ".md"})
        weights.write_bytes(b"damaged")
    finally:
        os.kill(stopped, signal.SIGCONT)
    for thread in threads:
        thread.join(60)
    for one in connections:
        one.close()
    assert [status for status, _ in results] == [500, 500]
    assert all("late" not in state for state in states(two))


def test_limits_of_connections_hold_for_all_workers_and_a_second_signal_ends_them_at_once(run: Run) -> None:
    with run(max_connections=5, drain_s=60) as service, contextlib.ExitStack() as stack:
        service.wait_ready()
        for _ in range(3):
            one = stack.enter_context(contextlib.closing(service.connect()))
            assert service.ask("/health/live", None, one)[0] == 200
        status, body = service.ask("/health/live")
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert "3 open connections" in body["error"]["message"]
        one.close()
        wait_until(lambda: service.ask("/health/live")[0] == 200)
        workers = service.workers
        for _ in range(2):
            service.process.send_signal(signal.SIGTERM)
            wait_until(lambda: bool(service.logged("draining")))
        assert service.process.wait(30) == 1
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_worker_that_is_killed_is_replaced_and_only_its_requests_fail_or_given_up_after_three_times(run: Run) -> None:
    with run() as service:
        service.wait_ready()
        with Load(service) as load:
            wait_until(lambda: len(load.statuses) > 20)
            counted = service.metric('sightline_http_requests_total{route="/v1/generate",status="200"}')
            victim = service.workers[0]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: len(service.logged("serving")) == 3)
            replaced = time.monotonic()
            wait_until(lambda: load.times[-1] > replaced + 0.2)
        failures = [status for status in load.statuses if status != 200]
        assert len(failures) <= load.num_clients  # those in flight in the killed worker
        assert {429, 503}.isdisjoint(failures)
        assert len(service.workers) == 2 and victim not in service.workers
        # Counters never fall: the last scrape of the worker that was killed still counts.
        assert service.metric('sightline_http_requests_total{route="/v1/generate",status="200"}') >= counted > 0
        assert "SIGKILL" in service.logged("a new one starts")[0]["message"]
        assert service.ask("/health/ready")[0] == 200
        # A worker that cannot start is given up, and the others go on.
        (service.folder / "toy").rename(service.folder.parent / f"{service.folder.name}-away")
        os.kill(service.workers[0], signal.SIGKILL)
        wait_until(lambda: bool(service.logged("is not started again")))
        assert "3 times in a row" in service.logged("is not started again")[0]["message"]
        for _ in range(3):
            assert service.ask("/v1/generate", GENERATE)[0] == 200
        assert len(service.workers) == 1
        assert (service.metric("sightline_workers "), service.metric("sightline_workers_failed ")) == (1, 1)


def test_sighup_replaces_all_workers_and_reads_the_bundles_again_and_they_end_if_the_supervisor_is_killed(
    run: Run, bundle: Path
) -> None:
    with run(default_model="toy") as service:
        service.wait_ready()
        before = service.workers
        copy_bundle(bundle, service.folder, "new")
        with Load(service) as load:
            wait_until(lambda: len(load.statuses) > 20)
            counted = service.metric('sightline_http_requests_total{route="/v1/generate",status="200"}')
            service.process.send_signal(signal.SIGHUP)
            wait_until(lambda: bool(service.logged("replaced the workers")))
        assert set(load.statuses) == {200}
        assert not set(before) & set(service.workers) and len(service.workers) == 2
        assert states(service) == [{"new": "ready", "toy": "ready"}] * 4
        # The counters of workers that have ended are kept.
        total = service.metric('sightline_http_requests_total{route="/v1/generate",status="200"}')
        assert counted > 0 and total == len(load.statuses)
        workers = service.workers
        service.process.kill()
        wait_until(lambda: not any(_runs(pid) for pid in workers))


def wait_logged(service: WorkerService, message: str) -> None:
    wait_until(lambda: bool(service.logged(message)))


def weights_of(service: WorkerService, name: str) -> Path:
    return max((service.folder / name).iterdir(), key=lambda path: path.stat().st_size)


def test_a_damaged_bundle_costs_no_model_that_works_and_one_that_changes_in_place_only_itself(run: Run) -> None:
    with run(copies=("one", "two"), default_model="one") as service:
        service.wait_ready()
        weights = weights_of(service, "two")
        content = weights.read_bytes()
        for data, message in ((b"damaged", "no other is replaced"), (content, "replaced the workers")):
            beside = weights.with_name("beside")
            beside.write_bytes(data)
            beside.replace(weights)
            service.process.send_signal(signal.SIGHUP)
            wait_logged(service, message)
            assert states(service) == [{"one": "ready", "two": "ready"}] * 4
        (reason,) = service.logged("cannot serve the models of the others")
        assert "two would be lost, because two cannot be served; repair it first" in reason["message"]
        weights.write_bytes(b"")  # in place: its pages are gone
        with pytest.raises((OSError, http.client.HTTPException)):
            service.ask("/v1/generate", GENERATE | {"model": "two"})
        wait_until(lambda: bool(service.logged("two is not served any more")))
        wait_until(lambda: len(service.workers) == 2 and states(service) == [{"one": "ready"}] * 4)
        assert "overwritten or truncated in place" in service.logged("SIGBUS")[0]["message"]
        assert "SIGBUS" in service.logged("a new one starts")[0]["message"]
        assert service.ask("/v1/generate", GENERATE)[0] == 200


def test_a_service_of_one_process_says_that_a_file_was_changed_in_place(run: Run) -> None:
    with run(workers=1) as service:
        service.wait_ready()
        weights_of(service, "toy").write_bytes(b"")
        with pytest.raises((OSError, http.client.HTTPException)):
            service.ask("/v1/generate", GENERATE)
        assert service.process.wait(60) == -signal.SIGBUS
        wait_until(lambda: bool(service.logged("overwritten or truncated in place")))


def test_a_worker_that_hangs_is_replaced_and_metrics_and_model_control_do_not_wait(run: Run) -> None:
    """It takes as long as a worker may be silent."""
    settings = {"default_model": "one", "model_control": "explicit"}
    with run(copies=("one", "two"), **settings) as service, contextlib.ExitStack() as stack:
        service.wait_ready()
        of_worker: dict[int, http.client.HTTPConnection] = {}
        for count in (1, 2):
            connection = stack.enter_context(contextlib.closing(service.connect()))
            assert service.ask("/v1/models", None, connection)[0] == 200
            wait_until(lambda count=count: len(service.logged("request")) == count)  # type: ignore[misc]
            of_worker[service.logged("request")[-1]["worker"]] = connection
        of_other = of_worker[2]
        victim = service.workers[0]
        os.kill(victim, signal.SIGSTOP)
        assert service.ask("/metrics", None, of_other)[0] == 200
        assert service.ask("/v2/repository/models/two/unload", {}, of_other)[0] == 200
        wait_until(lambda: victim not in service.workers and service.ask("/health/ready")[0] == 200)
        assert "worker 1 has shown no sign of life" in service.logged("no sign of life")[0]["message"]
        wait_until(lambda: len(service.logged("serving")) == 3 and states(service) == [{"one": "ready"}] * 4)


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False


@pytest.mark.parametrize("problem", ["no bundle", "port"])
def test_a_service_that_can_never_start_ends_with_3(run: Run, two: WorkerService, problem: str) -> None:
    settings = {"copies": ()} if problem == "no bundle" else {"port": two.port}
    with run(**settings) as service:
        assert service.process.wait(60) == 3
        wait_until(lambda: bool(service.logged("ended; starting again will not help")))
        errors = [line["message"] for line in service.lines if line["level"] == "error"]
        assert any(("bundles" in text) if problem == "no bundle" else ("in use" in text) for text in errors), errors


# `python -m sightline.service` with two cores, where every model is large, and two threads always
# or never pay.
WITH_TWO_CORES = """
import sys
from sightline.service.runtime import thread_counts
from sightline.service.workers import shares, supervisor
thread_counts.MIN_SECONDS = thread_counts.MIN_SPEEDUP = {limit}
thread_counts.MAX_BYTES_ALONE = supervisor.MAX_BYTES_ALONE = 0
shares.usable_threads = supervisor.usable_threads = lambda: 2
from sightline.service.__main__ import main
sys.exit(main([]))
"""


@pytest.mark.parametrize(("limit", "num_workers"), [(0.0, 1), (1e9, 2)])
def test_workers_and_threads_of_a_large_model_follow_from_one_measurement(
    run: Run, limit: float, num_workers: int
) -> None:
    program = ("-c", WITH_TWO_CORES.format(limit=limit))
    with run("auto", program=program, threads=0, max_waiting_sequences=90) as service:
        service.wait_ready()
        # The first worker measures alone. If fewer are chosen, another one with a larger share
        # replaces it.
        wait_until(lambda: len(service.logged("serving")) == 2)
        (chosen,) = service.logged("workers chosen")
        assert (chosen["workers"], chosen["max_threads"]) == (num_workers, 3 - num_workers)
        ready = [(line["worker"], line["threads"]) for line in service.logged("ready") if "threads" in line]
        threads = {"encoder": 3 - num_workers, "decoder": 3 - num_workers}
        assert ready == [(1, threads), (num_workers, threads)]
        wait_until(lambda: len(service.workers) == num_workers)
        assert service.metric('sightline_limit{setting="max_waiting_sequences"}') == 90


ALONE_WITH_TWO_THREADS = """
import sys
from sightline.service.runtime import thread_counts
from sightline.service.workers import shares, supervisor
thread_counts.BYTES_OF_THREAD = 1_000_000
shares.usable_threads = supervisor.usable_threads = lambda: 2
from sightline.service.__main__ import main
sys.exit(main([]))
"""


def test_a_worker_has_more_threads_while_the_others_are_idle_and_sigterm_lets_clients_leave(
    run: Run, two: WorkerService
) -> None:
    with run("auto", program=("-c", ALONE_WITH_TWO_THREADS), threads=0, drain_s=2) as service:
        service.wait_ready()
        wait_until(lambda: len(service.logged("serving")) == 2)
        ready = [(line["threads"], line["threads_alone"]) for line in service.logged("ready") if "threads" in line]
        assert ready == [({"encoder": 1, "decoder": 1}, 2)] * 2
        expected = two.ask("/v1/generate", GENERATE)[1]["outputs"]
        assert service.ask("/v1/generate", GENERATE)[1]["outputs"] == expected
        with Load(service, pause_s=0) as load:  # none is alone
            wait_until(lambda: len(load.statuses) > 20)
            assert service.ask("/v1/generate", GENERATE)[1]["outputs"] == expected
        assert set(load.statuses) == {200}
        with contextlib.closing(service.connect()) as open_before:
            assert service.ask("/v1/generate", GENERATE, open_before)[0] == 200
            service.process.send_signal(signal.SIGTERM)
            # The workers may not have read the message yet when the supervisor logs it.
            wait_until(lambda: bool(service.logged("draining")))
            wait_until(lambda: service.ask("/health/ready")[0] == 503)
            for connection in (open_before, None):
                assert service.ask("/v1/generate", GENERATE, connection)[0] == 200
        assert service.process.wait(60) == 0
        assert [line["exit_code"] for line in service.logged("ended")] == [0, 0, 0]


def test_the_share_of_a_worker_is_large_enough_for_its_largest_call() -> None:
    settings = Settings(max_rows=8, max_waiting_sequences=100, max_waiting_bytes=1 << 20, max_response_bytes=9)
    share = share_of(settings, 3)
    assert share.max_prefix_cache_bytes == -(-settings.max_prefix_cache_bytes // 3)
    assert (share.max_waiting_sequences, share.max_waiting_bytes, share.max_response_bytes) == (34, 1 << 20, 3)
    assert share.max_rows == 8  # a search with the largest number of beams
    assert share.max_state_bytes == -(-settings.max_state_bytes // 3)
    assert (share.max_connections, share.max_inputs) == (settings.max_connections, settings.max_inputs)


def test_the_gauges_of_the_settings_that_workers_share_are_added() -> None:
    settings = Settings(max_rows=64)
    share = share_of(settings, 2)
    changed = {name for name in Settings.model_fields if getattr(share, name) != getattr(settings, name)}
    assert changed == set(SHARED_SETTINGS)


@pytest.mark.parametrize(("settings", "expected"), read_table(__file__))
def test_workers_are_as_many_as_cores_unless_set(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(shares, "usable_threads", lambda: 4)
    monkeypatch.setattr(shares, "available_memory", lambda: 100 << 30)
    assert max_workers(Settings(**{"bundles": bundle.parent, **settings})) == expected


def test_little_memory_allows_fewer_workers(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "usable_threads", lambda: 64)
    for memory, expected in ((2 << 30, 5), (1 << 30, 2), (1 << 28, 1)):
        monkeypatch.setattr(shares, "available_memory", lambda memory=memory: memory)
        assert max_workers(Settings(bundles=bundle.parent)) == expected


@pytest.mark.parametrize("workers", ["0", "257", "-1", "two", "1.5", ""])
def test_a_wrong_number_of_workers_is_an_error(workers: str) -> None:
    with pytest.raises(UsageError, match=r"SIGHTLINE_WORKERS: .* auto or a number from 1 to 256, got"):
        make_settings({}, {"SIGHTLINE_WORKERS": workers})


def test_quotas_hold_for_all_workers_and_administrators_have_their_own_port(run: Run, tmp_path: Path) -> None:
    keys, others = tmp_path / "keys.json", {"tokens_per_minute": 10_000, "concurrent_sequences": 1}
    secret, other = add_key(keys, "a", "use", Quota(requests_per_minute=4, **others)), add_key(keys, "admin", "admin")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with run(keys=keys, admin_address=f"127.0.0.1:{port}") as service:
        service.wait_ready()
        headers = {"X-API-Key": secret, "Content-Type": "application/json"}
        statuses: Counter[int] = Counter()
        with contextlib.ExitStack() as stack:  # connections are divided among the workers
            connections = [stack.enter_context(contextlib.closing(service.connect())) for _ in range(4)]
            for connection in (*connections, *connections):
                connection.request("POST", "/v1/generate", json.dumps({"inputs": "a"}), headers)
                response = connection.getresponse()
                response.read()
                statuses[response.status] += 1
        assert statuses == {200: 4, 429: 4}
        assert len({line["worker"] for line in service.logged("request")}) == 2
        statuses_of = {}
        for number in (service.port, port):
            for path in ("/metrics", "/v1/models", "/health/ready"):
                connection = http.client.HTTPConnection("127.0.0.1", number, timeout=20)
                with contextlib.closing(connection):
                    connection.request("GET", path, headers={"X-API-Key": other})
                    statuses_of[number, path] = connection.getresponse().status
        assert list(statuses_of.values()) == [404, 200, 200, 200, 404, 200]
