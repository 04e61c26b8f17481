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
    def test_a_token_itself_does_not_show_and_does_not_leave_the_process(self) -> None:
        secret = as_secret("api_key", "hunter2")
        assert secret is not None
        assert secret.value == "hunter2"
        assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
        with pytest.raises(ConfigError, match="does not leave its process") as refused:
            pickle.dumps(secret)
        assert "api_key='env:NAME'" in str(refused.value)
        assert "hunter2" not in str(refused.value)

    def test_a_variables_name_travels_and_its_value_is_read_where_it_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RWS_TEST_KEY", "hunter2")
        secret = as_secret("api_key", "env:RWS_TEST_KEY")
        pickled = pickle.dumps(secret)
        assert b"hunter2" not in pickled
        assert "hunter2" not in f"{secret} {secret!r}"
        monkeypatch.setenv("RWS_TEST_KEY", "hunter3")
        assert pickle.loads(pickled).value == "hunter3"

    def test_a_variable_that_is_not_set_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RWS_TEST_KEY", raising=False)
        secret = as_secret("api_key", "env:RWS_TEST_KEY")
        assert secret is not None
        with pytest.raises(ConfigError, match="RWS_TEST_KEY, which an api_key is to be read from, is not set in this process"):
            _ = secret.value

    @pytest.mark.parametrize("value", ["", "hunter2 b", "hunter2\r\nX: y"])
    def test_a_variable_that_holds_no_token_is_named_and_its_value_is_not(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("RWS_TEST_KEY", value)
        secret = as_secret("api_key", "env:RWS_TEST_KEY")
        assert secret is not None
        with pytest.raises(ConfigError, match="RWS_TEST_KEY must hold an api_key") as refused:
            _ = secret.value
        assert "hunter2" not in str(refused.value)

    @pytest.mark.parametrize("value", ["env:", "env: A", "env:1A", "env:A-B", "env:A=hunter2"])
    def test_what_is_no_name_of_a_variable_is_refused_and_not_repeated(self, value: str) -> None:
        with pytest.raises(ConfigError, match="the name of an environment variable must follow") as refused:
            as_secret("api_key", value)
        assert "hunter2" not in str(refused.value)

    @pytest.mark.parametrize("value", ["", "hunter2\r\nX: y", "hunter2 b", "hünter2", 7])
    def test_what_does_not_fit_into_a_header_is_refused_and_not_repeated(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="api_key must be") as refused:
            as_secret("api_key", value)
        assert "hunter2" not in str(refused.value)
