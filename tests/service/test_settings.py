from pathlib import Path

import pytest
from pydantic import ValidationError

from sightline.service.settings import Settings, SettingsError, env_name, flag_name, read_settings


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
    with pytest.raises(SettingsError, match=key):
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
    with pytest.raises(SettingsError, match=env_name(name)):
        read_settings([], {env_name(name): value})


def test_the_admin_address_may_be_of_ipv6() -> None:
    settings = read_settings([], {"SIGHTLINE_ADMIN_ADDRESS": "[::1]:9000"})
    assert settings.addresses == [("127.0.0.1", 8000), ("::1", 9000)] and settings.admin_port == 9000


def test_contradictory_settings_are_rejected_with_both_values() -> None:
    with pytest.raises(
        SettingsError, match=r"SIGHTLINE_QUEUE_TIMEOUT_S \(60\) exceeds SIGHTLINE_REQUEST_TIMEOUT_S \(30\)"
    ):
        read_settings(["--queue-timeout-s", "60"], {})
    with pytest.raises(
        SettingsError, match=r"SIGHTLINE_MAX_BODY_BYTES \(100\) exceeds SIGHTLINE_MAX_WAITING_BYTES \(10\)"
    ):
        read_settings(["--max-body-bytes", "100", "--max-waiting-bytes", "10"], {})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--help"], {})
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert flag_name(name) in text
        assert field.description


def test_a_value_that_is_not_allowed_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^SIGHTLINE_PORT \(--port\) must be a valid integer, got 'abc'$"):
        read_settings(["--port", "abc"], {})
