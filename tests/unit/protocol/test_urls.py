"""Addresses are kept in one form or refused when given; secrets do not show."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.urls import as_secret, base_url, is_loopback


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000//", "http://h:8000"),
        ("http://h:8000//api//v2/", "http://h:8000/api/v2"),
        ("HTTP://Host.Example:80/Prefix", "http://host.example/Prefix"),
        ("https://h:443", "https://h"),
        ("https://h:80", "https://h:80"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://10.0.0.1", "http://10.0.0.1"),
    ],
)
def test_an_address_is_kept_in_one_form(url: str, kept: str) -> None:
    assert base_url(url) == kept
    assert base_url(kept) == kept


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:8000", r"has no scheme; write http://localhost:8000 or https://"),
        ("//h", "has no scheme"),
        ("", "has no scheme"),
        ("ftp://h", "must be http or https, not 'ftp'"),
        ("http://", "no valid host"),
        ("http:///path", "no valid host"),
        ("http://h:99999", "not a valid URL"),
        ("http://h:port", "not a valid URL"),
        ("http://h:0", "port 0"),
        ("http://::1:8000", "not a valid URL"),
        ("http://[::1", "not a valid URL"),
        ("http://[zz::1]", "not a valid URL"),
        ("http://h?a=1", "no query"),
        ("http://h/#top", "no query and no fragment"),
        ("http://h/?", "no query"),
        ("http://a b", "white space"),
        ("http://h\n.example", "white space"),
        ("http://h\\evil", "backslash"),
        (7, "must be a string, not int"),
        (None, "must be a string"),
    ],
)
def test_what_is_no_base_url_is_refused_when_given(url: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        base_url(url)


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@h:8000", "http://hunter2@h", "user:hunter2@h:8000", "ftp://u:hunter2@h", "http://u:hunter2@h:x"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        base_url(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("host", ["localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "[::1]", "[::ffff:127.0.0.1]"])
def test_this_machine_is_known_without_a_name_server(host: str) -> None:
    assert is_loopback(f"http://{host}:8000")


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost.example", "127.0.0.1.example", "[2001:db8::1]", "h"])
def test_another_host_is_not_this_machine(host: str) -> None:
    assert not is_loopback(f"http://{host}:8000")


class TestSecret:
    def test_it_does_not_show_but_travels(self) -> None:
        secret = as_secret("api_key", "hunter2")
        assert secret is not None
        assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
        assert pickle.loads(pickle.dumps(secret)).value == "hunter2"

    @pytest.mark.parametrize("value", ["", "hunter2\r\nX: y", "hunter2 b", "hünter2", 7])
    def test_what_does_not_fit_into_a_header_is_refused_and_not_repeated(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="api_key must be") as refused:
            as_secret("api_key", value)
        assert "hunter2" not in str(refused.value)
