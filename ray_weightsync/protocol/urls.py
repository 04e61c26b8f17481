"""Addresses and secrets of HTTP engines: what is accepted, in which one form it is kept, and what is never shown."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Any
from urllib.parse import urlsplit

from ray_weightsync.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9._~-]+")

ENV = "env:"
"""Starts an api_key that names an environment variable."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = "a non-empty string of printable ASCII characters without spaces"


class Secret:
    """A bearer token that shows in no repr, log or error, and leaves its process only as the name of an environment variable. Immutable.

    Attributes:
        variable: Where the token is read, in whatever process uses it; None for one that was given itself.
    """

    __slots__ = ("_literal", "variable")

    def __init__(self, variable: str | None, literal: str | None = None) -> None:
        self.variable = variable
        self._literal = literal

    @classmethod
    def left_behind(cls) -> Secret:
        """What remains of a token given itself where it was not to travel."""
        return cls(None)

    @property
    def is_literal(self) -> bool:
        """Whether the token was given itself, and is here."""
        return self._literal is not None

    @property
    def is_here(self) -> bool:
        """False for what remains of a token that was given itself, in another process."""
        return self.is_literal or self.variable is not None

    @property
    def value(self) -> str:
        """The token.

        Raises:
            ConfigError: if this process has no such variable, or it holds no token; its value is not repeated. Or if the token was given
                itself, to another process.
        """
        if self._literal is not None:
            return self._literal
        if self.variable is None:
            raise ConfigError(
                "its api_key was given as the token itself, which did not travel with the reference (what Ray carries, it may show)",
                hint=f"give api_key='{ENV}NAME', and set the variable NAME where the process that makes the requests gets its environment",
            )
        value = os.environ.get(self.variable)
        if value is None:
            raise ConfigError(
                f"the environment variable {self.variable}, which an api_key is to be read from, is not set in this process",
                hint="set it where the process that makes the requests gets its environment: of a session, where Ray was started",
            )
        if not _is_token(value):
            raise ConfigError(f"the environment variable {self.variable} must hold an api_key: {_TOKEN}")
        return value

    def __str__(self) -> str:
        return "***"

    def __repr__(self) -> str:
        return f"'{ENV}{self.variable}'" if self.variable is not None else "'***'"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self.variable, self._literal) == (other.variable, other._literal)

    def __hash__(self) -> int:
        return hash((self.variable, self._literal))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._literal is not None:
            raise ConfigError(
                "an api_key given as the token itself does not leave its process: what Ray carries, it stores and may show",
                hint=f"give api_key='{ENV}NAME', and set the variable NAME where the requests are made",
            )
        return Secret, (self.variable,)


def as_secret(name: str, value: str | Secret | None) -> Secret | None:
    """``value``, a token or ``"env:NAME"``, as a bearer token, and one of these as it is. No variable is read here.

    Raises:
        ConfigError: if it is neither the name of a variable nor a string that fits into a header; the value is not repeated.
    """
    if value is None or isinstance(value, Secret):
        return value
    if isinstance(value, str) and value.startswith(ENV):
        if not _VARIABLE.fullmatch(value.removeprefix(ENV)):
            raise ConfigError(f"{name} begins with {ENV!r}, so the name of an environment variable must follow: letters, digits and '_'")
        return Secret(value.removeprefix(ENV))
    if not isinstance(value, str) or not _is_token(value):
        raise ConfigError(f"{name} must be None, '{ENV}NAME' or {_TOKEN}")
    return Secret(None, value)


def _is_token(value: str) -> bool:
    return value != "" and value.isascii() and value.isprintable() and " " not in value


def base_url(url: str) -> str:
    """The one form of a server's address: scheme and host in lower case, no default port, single slashes, none at the end.

    Credentials in a URL are refused rather than masked: a URL is a name here, and ends up in labels, logs and reports.

    Raises:
        ConfigError: for anything but an ``http`` or ``https`` URL with a host and, at most, a port and a path.
    """
    if not isinstance(url, str):
        raise ConfigError(f"a base URL must be a string, not {type(url).__name__}")
    if not url.isprintable() or " " in url or "\\" in url:
        raise ConfigError(f"{_shown(url)} is not a URL: it holds white space, a backslash or a control character")
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"{_shown(url)} has no scheme; write http://{_shown(url, quote=False)} or https://{_shown(url, quote=False)}")
    if scheme.lower() not in _DEFAULT_PORTS:
        raise ConfigError(f"{_shown(url)}: the scheme must be http or https, not {scheme!r}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"{_shown(url)} is not a valid URL: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{_shown(url)} holds credentials; a URL ends up in logs, so give a token with api_key=")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ConfigError(f"{_shown(url)} must end with its path: no query and no fragment")
    name = _host(host, url)
    if port == 0:
        raise ConfigError(f"{_shown(url)}: port 0 is no address")
    default = port is None or port == _DEFAULT_PORTS[parts.scheme]
    path = re.sub("/+", "/", parts.path).rstrip("/")
    return f"{parts.scheme}://{name}{'' if default else f':{port}'}{path}"


def is_loopback(url: str) -> bool:
    """Whether what is sent to ``url`` stays on this machine, told without asking a name server."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _host(host: str, url: str) -> str:
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ConfigError(f"{_shown(url)}: {error}") from None
        return f"[{host}]"
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{_shown(url)} has no valid host name")
    return host


def _shown(url: str, *, quote: bool = True) -> str:
    """``url`` for an error message: whatever could be credentials is masked."""
    shown = re.sub(r"(^|//)[^/]*@", r"\1***@", url)
    return repr(shown) if quote else shown
