"""Tables of request heads that are served, in origin form, and of those that are 400."""

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.service.api_errors import ApiError
from sightline.service.http.guarded_protocol import check_head

HOST = [(b"host", b"x")]


@pytest.mark.parametrize(
    ("target", "origin_form"),
    [
        (b"/", b"/"),
        (b"/v1/models/a%20b?x=1&y={|}", b"/v1/models/a%20b?x=1&y={|}"),
        (b"//a//b", b"//a//b"),
        (b"/a:b@c/../d", b"/a:b@c/../d"),
        (b"http://x/a", b"/a"),
        (b"https://x:8000/a?b", b"/a?b"),
        (b"HTTP://[::1]:8000/a", b"/a"),
        (b"http://under_score,comma/a", b"/a"),
        (b"http://x", b"/"),
        (b"http://x?b", b"/?b"),
    ],
)
def test_a_path_with_or_without_a_host_is_served(target: bytes, origin_form: bytes) -> None:
    assert check_head(b"GET", target, "1.1", HOST) == origin_form
    assert httptools.parse_url(origin_form).path.startswith(b"/")


@pytest.mark.parametrize(
    "target",
    [
        *(b"", b"*", b"a", b"?a", b"x:80", b"/a b", b"/a#b", b"/\xff", b"/a\x00", b"/a\n", b"http://", b"http:///a"),
        *(b"http://:80/a", b"http://u:p@x/a", b"http://x#a", b"http://x y/a", b"ftp://x/a", b"http:/x"),
    ],
)
def test_any_other_target_is_malformed(target: bytes) -> None:
    with pytest.raises(ApiError, match="malformed_request: The request target must be a path"):
        check_head(b"GET", target, "1.1", HOST)


def test_an_asterisk_is_only_a_target_of_options() -> None:
    assert check_head(b"OPTIONS", b"*", "1.1", HOST) == b"*"


@pytest.mark.parametrize("target", [b"x:443", b"/", b"http://x/"])
def test_connect_is_malformed_with_any_target(target: bytes) -> None:
    with pytest.raises(ApiError, match="CONNECT and proxying are not supported"):
        check_head(b"CONNECT", target, "1.1", HOST)


@pytest.mark.parametrize("version", ["0.9", "2.0", "1.2", "3.0"])
def test_other_versions_are_malformed(version: str) -> None:
    with pytest.raises(ApiError, match=r"malformed_request: The HTTP version must be 1\.1 or 1\.0"):
        check_head(b"GET", b"/", version, HOST)


@pytest.mark.parametrize(
    "host",
    [
        *(b"x", b"x:", b"x:80", b"", b"a.b-c_d", b"127.0.0.1:8000", b"[::1]", b"[::ffff:1.2.3.4]:80", b"%C3%A4.de"),
        b"x" * 300,
    ],
)
def test_a_host_is_a_name_or_an_address_and_a_port(host: bytes) -> None:
    assert check_head(b"GET", b"/", "1.1", [(b"a", b"b"), (b"host", host)]) == b"/"


@pytest.mark.parametrize(
    "host", [b"a b", b"x:y", b"x:80:80", b"http://x", b"x/y", b"u@x", b"[::1", b"::1", b"[g]", b"\xc3\xa4", b"a\tb"]
)
def test_any_other_host_is_malformed(host: bytes) -> None:
    with pytest.raises(ApiError, match="malformed_request: The Host header must be a host name or address"):
        check_head(b"GET", b"/", "1.1", [(b"host", host)])


def test_http_1_1_has_one_host_and_http_1_0_has_one_at_most() -> None:
    for version, headers in (("1.1", []), ("1.1", HOST * 2), ("1.0", HOST * 2)):
        with pytest.raises(ApiError, match=f"malformed_request: .* one Host header, got {len(headers)}"):
            check_head(b"GET", b"/", version, headers)
    assert check_head(b"GET", b"/", "1.0", []) == check_head(b"GET", b"/", "1.0", HOST) == b"/"


@settings(deadline=None)
@given(st.binary(max_size=12) | st.text("/?#:@[]%hHtTpP.*~!x ", max_size=20).map(str.encode))
def test_the_parser_reads_what_is_accepted(target: bytes) -> None:
    try:
        origin_form = check_head(b"GET", target, "1.1", HOST)
    except ApiError:
        return
    assert httptools.parse_url(origin_form).path.decode("ascii").startswith("/")
