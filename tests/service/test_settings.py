import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from sightline.base.errors import UsageError
from sightline.base.options import flag_name
from sightline.service.settings import (
    SETTINGS,
    Settings,
    env_name,
    make_settings,
    read_flags,
    service_parser,
)


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    return make_settings(read_flags(service_parser(), arguments), environment)


def test_the_defaults_serve_the_folder_bundles_on_the_loopback() -> None:
    settings = read_settings([], {})
    assert (settings.host, settings.port, settings.bundles) == ("127.0.0.1", 8000, Path("bundles"))


def test_flags_override_environment_variables() -> None:
    environment = {"SIGHTLINE_PORT": "9000", "SIGHTLINE_MAX_ROWS": "8", "HOME": "/"}
    settings = read_settings(["--max-rows", "16"], environment)
    assert (settings.port, settings.max_rows) == (9000, 16)


def test_the_environment_of_the_process_is_not_read_implicitly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGHTLINE_PORT", "9000")
    assert (Settings().port, read_settings([], {}).port) == (8000, 8000)


@pytest.mark.parametrize("key", ["SIGHTLINE_PROT", "sightline_nothing", "sightline_port", "SIGHTLINE_"])
def test_an_unknown_variable_is_rejected_by_name(key: str) -> None:
    with pytest.raises(UsageError, match=key):
        read_settings([], {key: "1"})


@pytest.mark.parametrize("flag", ["--prot", "--max-row"])
def test_an_unknown_or_shortened_flag_is_rejected_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings([flag, "1"], {})
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", "65536"), ("port", "x"), ("threads", "-1"), ("provider", "tpu"), ("drain_s", "nan"), ("max_rows", "-1")]
    + [("admin_address", value) for value in ("9000", ":9000", "x:", "x:0", "x:65536", "127.0.0.1:8000")],
)
def test_a_value_out_of_range_is_rejected_with_the_name_of_the_setting(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=env_name(name)):
        read_settings([], {env_name(name): value})


def test_the_admin_address_may_be_of_ipv6() -> None:
    settings = read_settings([], {"SIGHTLINE_ADMIN_ADDRESS": "[::1]:9000"})
    assert settings.addresses == [("127.0.0.1", 8000), ("::1", 9000)] and settings.admin_port == 9000


def test_contradictory_settings_are_rejected_with_both_values() -> None:
    with pytest.raises(
        UsageError, match=r"SIGHTLINE_QUEUE_TIMEOUT_S \(60\) exceeds SIGHTLINE_REQUEST_TIMEOUT_S \(30\)"
    ):
        read_settings(["--queue-timeout-s", "60"], {})


def test_limits_follow_from_settings() -> None:
    settings = Settings(memory_bytes=1 << 30, max_body_bytes=1 << 25, max_waiting_sequences=10, max_connections=7)
    assert (settings.max_state_bytes, settings.max_prefix_cache_bytes) == (1 << 29, 1 << 27)
    assert (settings.max_waiting_bytes, settings.max_waiting_tokens) == (1 << 25, 2560)
    assert settings.max_connections_per_address == 4
    assert Settings(prefix_cache=False).max_prefix_cache_bytes == 0
    assert Settings(memory_bytes=1 << 40).max_prefix_cache_bytes == 1 << 30
    for memory, responses in ((1 << 30, 128 << 20), (64 << 20, 32 << 20), (1 << 40, 1 << 30)):
        assert Settings(memory_bytes=memory).max_response_bytes == responses


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--port", "abc"], {}, "--port must be a whole number from 0 to 65535, got 'abc'"),
        ([], {"SIGHTLINE_MEMORY_BYTES": "-1"}, "SIGHTLINE_MEMORY_BYTES must be a whole number, at least 0, got '-1'"),
    ],
)
def test_an_invalid_setting_is_named_once(flags: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        read_settings(flags, environment)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_help_names_every_setting_with_the_kind_and_unit_of_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--help"], {})
    text = capsys.readouterr().out
    for name, field in SETTINGS.items():
        assert flag_name(name) in text
        assert field.description
    for shown in (
        *("--page, --no-page", "--client-timeout-s SECONDS", "--memory-bytes BYTES"),
        *("--bundles FOLDER", "--max-rows N", "--provider {auto,cpu,cuda}"),
    ):
        assert shown in text
    assert "VALUE" not in text


def test_a_switch_has_a_negative_form_and_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_settings(["--page", "--no-prefix-cache"], {"SIGHTLINE_PAGE": "false"}).page
    assert not read_settings(["--no-page"], {}).page and not read_settings([], {"SIGHTLINE_PAGE": "false"}).page
    for arguments in (["--page", "false"], ["--page=false"], ["--strict-loading", "--page", "true", "--port", "1"]):
        with pytest.raises(SystemExit):
            read_settings(arguments, {})
        assert re.search("error: (unrecognized arguments|.*ignored explicit argument)", capsys.readouterr().err)
