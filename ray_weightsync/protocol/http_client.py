"""`HTTPVLLMWeightSyncClient`: the control plane of vLLM servers, over their HTTP routes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol.blocking import BlockingClient, Call
from ray_weightsync.protocol.http_channel import HTTPChannel
from ray_weightsync.protocol.http_routes import SERVER_INFO, WEIGHT_INFO
from ray_weightsync.protocol.messages import Payload


class HTTPVLLMWeightSyncClient(BlockingClient):
    """Drives vLLM servers started with ``VLLM_SERVER_DEV_MODE=1``, all at once.

    Usable alone, and by vLLM's own trainer engines as their client. Reads are tried up to three times, nothing else is ever repeated.
    A call to a route that the server does not have is an `UnsupportedError`, unless it is one of the protocol's four.

    Args:
        base_urls: One base URL such as ``"http://127.0.0.1:8000"``, or several; a path prefix is kept.
        timeout: Seconds until a server that has not answered counts as failed, for each call.
        api_key: Bearer token, sent with every request and never shown, or ``"env:NAME"``: it is in that variable of whatever process makes
            the requests. With a token itself the client cannot be pickled. vLLM does not check it on these routes.
        verify: Whether certificates are checked, or the path of a CA bundle to check them with.
        allow_pickle: Whether updates may carry CUDA IPC handles, as a pickle that the server's vLLM loads
            (``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` there). True allows it to this machine and over https, ``"plain-http"`` everywhere.

    Raises:
        ConfigError: if there is no URL, one is given twice or is not valid, or an argument is wrong.
    """

    def __init__(
        self,
        base_urls: str | Sequence[str],
        timeout: float = 300,
        api_key: str | None = None,
        verify: bool | str = True,
        allow_pickle: bool | Literal["plain-http"] = False,
    ) -> None:
        several: list[Any] = list(base_urls) if isinstance(base_urls, list | tuple) else [base_urls]
        self._servers = [HTTPChannel(url, api_key=api_key, verify=verify, allow_pickle=allow_pickle) for url in several]
        urls = [server.base_url for server in self._servers]
        for index, url in enumerate(urls):
            if url in urls[:index]:
                raise ConfigError(f"base_urls[{index}] is the same server as base_urls[{urls.index(url)}]: {url}")
        super().__init__(self._servers, timeout=timeout)
        self._keeps_labels = False

    def server_info(self) -> list[dict[str, Any]]:
        """Each server's configuration: ``"vllm_config"`` as a dict, ``"vllm_env"``, ``"system_env"``."""
        return [dict(answer) for answer in self._ask(SERVER_INFO)]

    def weight_info(self) -> list[dict[str, Any]]:
        """What each server says of its weights, as it says it; ``"weight_version"`` is in it."""
        return [dict(answer) for answer in self._ask(WEIGHT_INFO)]

    def _require_labels(self) -> None:
        # A server's version is known only by asking. vLLM got the route that reads the label and the one that sets it together.
        if not self._keeps_labels:
            self._ask(verbs.GET_VERSION)
            self._keeps_labels = True

    def _payload_calls(self, verb: str, payloads: Sequence[Payload]) -> list[Call]:
        exchanges = [server.prepared(verb, each) for server, each in zip(self._servers, payloads, strict=True)]
        return [partial(server.perform, verb, exchange) for server, exchange in zip(self._servers, exchanges, strict=True)]
