"""The control plane of one vLLM server, over its HTTP routes (``VLLM_SERVER_DEV_MODE=1``).

An answer counts only if it is the JSON expected: a proxy's HTML page with status 200 is no success, and a redirect would turn a POST into a
GET. A POST is never repeated; a read is. Each exchange has a connection of its own: on a kept one that the server has closed
meanwhile, nobody could tell whether a POST was carried out.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from typing import Any, Literal

import pybase64
import requests
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol.chain import StepByStep
from ray_weightsync.protocol.http_routes import NOTHING, ROUTES, SERVER_INFO, Exchange, UnexpectedAnswer
from ray_weightsync.protocol.messages import IPC_HANDLES, Payload
from ray_weightsync.protocol.reading import ChannelError, EngineRestarted, workers_words
from ray_weightsync.protocol.threads import in_daemon_thread
from ray_weightsync.protocol.urls import Secret, as_secret, base_url, is_loopback

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
ANSWER_S = 3600.0
"""After an hour an exchange gives up its socket. The deadlines that matter are those of the phases, and shorter."""

READ_ATTEMPTS = 3
READ_RETRY_S = 0.1
MAX_BODY_CHARS = 500

IPC_HANDLES_PICKLED = "ipc_handles_pickled"

_DEV_MODE = "is VLLM_SERVER_DEV_MODE=1 set where the server was started?"
_TRANSIENT = (502, 503, 504)


class HTTPCallError(ChannelError):
    """A server refused, failed or did not answer; the text names the URL, the status and what the server said.

    Attributes:
        url: What was asked for. Never holds credentials.
        status: HTTP status, None if no answer arrived.
        may_have_run: Whether the server may have carried out the call.
    """

    def __init__(self, text: str, url: str, status: int | None, may_have_run: bool) -> None:
        self.url = url
        self.status = status
        self.may_have_run = may_have_run
        super().__init__(text, url, status, may_have_run)

    def __str__(self) -> str:
        return str(self.args[0])


class HTTPChannel(StepByStep):
    """One vLLM server.

    Proxies of the environment are used for other hosts, never for this one. vLLM's weight routes are found only
    on a server started with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        url: Base URL such as ``"http://127.0.0.1:8000"``; a path prefix is kept.
        label: The engine's name in errors and logs; the URL by default.
        api_key: Bearer token, sent with every request, or ``"env:NAME"``: it is in that variable of whatever process makes the requests.
            The channel can be pickled with the latter only.
        verify: Whether certificates are checked, or the path of a CA bundle to check them with.
        allow_pickle: Whether updates may carry CUDA IPC handles, as a pickle that **vLLM** loads. True allows it to this machine and over
            https, ``"plain-http"`` everywhere.

    Raises:
        ConfigError: if an argument is wrong, or the variable is not set here; credentials in the URL are refused.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str | None = None,
        api_key: str | Secret | None = None,
        verify: bool | str = True,
        allow_pickle: bool | Literal["plain-http"] = False,
    ) -> None:
        if not isinstance(verify, bool | str) or verify == "":
            raise ConfigError(f"verify must be True, False or the path of a CA bundle, not {verify!r}")
        if allow_pickle not in (True, False, "plain-http"):
            raise ConfigError(f"allow_pickle must be True, False or 'plain-http', not {allow_pickle!r}")
        self.base_url = base_url(url)
        self.label = self.base_url if label is None else label
        self.verify = verify
        self.allow_pickle = allow_pickle
        self._api_key: Secret | None = as_secret("api_key", api_key)
        if self._api_key is not None:
            _ = self._api_key.value  # a variable that is not set is told now, not in the middle of an update
        self._is_loopback = is_loopback(self.base_url)
        if not self._is_loopback and self.base_url.startswith("http:"):
            logger.warning(
                "%s: plain http to another host, and vLLM does not check its --api-key on the weight routes: whoever reaches that port "
                "can pause the engine and change its weights%s",
                self.base_url,
                ", and the api_key given here travels unencrypted" if self._api_key else "",
            )

    def __repr__(self) -> str:
        return f"HTTPChannel({self.base_url!r}{'' if self._api_key is None else f', api_key={self._api_key}'})"

    def supports(self, verb: str) -> bool:
        """Whether vLLM has a route for ``verb``. That this server's version has it is known only when it is asked."""
        return verb in ROUTES

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``verb`` and return what the server answered; see `Channel`.

        Raises:
            TypeError, ConfigError: if the arguments cannot be sent; nothing was.
            UnsupportedError: if the server, or this channel, has no such route; nothing was done.
            HTTPCallError: for any other answer than the one expected, or none.
        """
        return await self.perform(verb, self.prepared(verb, *args, **kwargs))

    async def identity(self) -> str | None:
        """Which server answers at this URL now; equal to ``EngineFacts.incarnation``."""
        info = await self.call(SERVER_INFO)
        return info["vllm_config"].get("instance_id") or None

    async def require_incarnation(self, incarnation: str) -> None:
        """Raise `EngineRestarted` if another server answers at this URL now."""
        if (here := await self.identity()) != incarnation:
            raise EngineRestarted(f"{self.label} restarted: another server ({here}) answers at {self.base_url}, and it was told nothing")

    def prepared(self, verb: str, *args: Any, **kwargs: Any) -> Exchange:
        """The exchange that `call` would carry out. Apart, so that a client can check every server's before it sends any.

        Raises:
            TypeError, ConfigError: if the arguments cannot be sent.
            UnsupportedError: if there is no route for ``verb``.
        """
        route = ROUTES.get(verb)
        if route is None:
            raise verbs.unsupported(verb, (self.label,))
        if verb == verbs.UPDATE and args:
            args = (self._with_handles_encoded(args[0]), *args[1:])
        return route(*args, **kwargs)

    async def perform(self, verb: str, exchange: Exchange) -> Any:
        """Carry out an exchange made by `prepared`; raises as `call` does."""
        return await in_daemon_thread(lambda: self._carry_out(verb, exchange))

    def _with_handles_encoded(self, update: Payload) -> Payload:
        if isinstance(update, list):
            return [self._entry_encoded(entry) for entry in update]
        return self._entry_encoded(update)

    def _entry_encoded(self, update: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(update, dict) or (update.get(IPC_HANDLES) is None and update.get(IPC_HANDLES_PICKLED) is None):
            return update
        if not self.allow_pickle:
            raise ConfigError(
                f"{self.label}: nothing was sent: {IPC_HANDLES} travel over HTTP as a pickle, which vLLM loads (its server then needs "
                "VLLM_ALLOW_INSECURE_SERIALIZATION=1): whoever can reach that port can run code there. allow_pickle=True accepts that"
            )
        if self.allow_pickle != "plain-http" and not self._is_loopback and self.base_url.startswith("http:"):
            raise ConfigError(
                f"{self.label}: nothing was sent: a pickle over plain http to another host can be replaced on its way, and vLLM would load "
                "it. IPC handles work within one machine: use a loopback URL, or https; allow_pickle='plain-http' accepts the risk"
            )
        encoded = {key: value for key, value in update.items() if key != IPC_HANDLES}
        if update.get(IPC_HANDLES) is not None:
            encoded[IPC_HANDLES_PICKLED] = pybase64.b64encode(pickle.dumps(update[IPC_HANDLES])).decode("ascii")
        return encoded

    def _carry_out(self, verb: str, exchange: Exchange) -> Any:
        attempts = READ_ATTEMPTS if exchange.method == "GET" else 1
        for attempt in range(1, attempts):
            try:
                return self._exchange(verb, exchange)
            except HTTPCallError as error:
                if error.status is not None and error.status not in _TRANSIENT:
                    raise
                logger.info("%s: read %d of %d failed: %s", self.label, attempt, attempts, error)
                time.sleep(READ_RETRY_S * attempt)
        return self._exchange(verb, exchange)

    def _exchange(self, verb: str, exchange: Exchange) -> Any:
        url = f"{self.base_url}/{exchange.path}"
        body = None if exchange.body is None else json.dumps(exchange.body, allow_nan=False).encode()
        with requests.Session() as session:
            session.trust_env = not self._is_loopback
            try:
                response = session.request(
                    exchange.method,
                    url,
                    params=dict(exchange.params),
                    data=body,
                    headers={"Accept": "application/json", **({} if body is None else {"Content-Type": "application/json"})},
                    auth=_Bearer(self._api_key),
                    timeout=(CONNECT_S, ANSWER_S),
                    allow_redirects=False,
                    verify=self.verify,
                )
            except requests.RequestException as error:
                raise self._no_answer(exchange, url, error) from None
        return self._read(verb, exchange, url, response)

    def _no_answer(self, exchange: Exchange, url: str, error: requests.RequestException) -> HTTPCallError:
        before_sending = (requests.exceptions.SSLError, requests.exceptions.ProxyError, requests.exceptions.ConnectTimeout)
        cause = getattr(error.args[0], "reason", None) if error.args else None
        # requests wraps the one line that matters, such as "Connection refused", in the whole request.
        said = self._masked(f"{type(error).__name__}: {cause if isinstance(cause, Exception) else error}")
        if isinstance(error, before_sending) or isinstance(cause, NewConnectionError | ConnectTimeoutError):
            return HTTPCallError(f"{exchange.method} {url}: no connection, nothing was sent ({said})", url, None, False)
        if exchange.method == "GET":
            return HTTPCallError(f"GET {url}: no answer ({said})", url, None, True)
        text = f"POST {url}: the connection broke before an answer came: the server may have carried the call out"
        return HTTPCallError(f"{text}. It was not repeated ({said})", url, None, True)

    def _read(self, verb: str, exchange: Exchange, url: str, response: requests.Response) -> Any:
        status = response.status_code
        begin = f"{exchange.method} {url}: {status} {response.reason or ''}".rstrip()
        answer = _parsed(response)
        said = self._masked(_server_words(response, answer))
        if 300 <= status < 400:
            target = self._masked(response.headers.get("Location", "nowhere"))
            text = f"{begin}: redirects are refused, one would turn a POST into a GET; it leads to {target}. Give the final URL"
            raise HTTPCallError(text, url, status, False)
        if status in (404, 405) and verb not in verbs.REQUIRED_VERBS and said.lower() in ("not found", "method not allowed"):
            raise verbs.unsupported(verb, (self.label,), hint=f"{url} answered {status}; {_DEV_MODE}")
        if status != 200:
            why = {404: f" ({_DEV_MODE})", 401: self._key_hint(), 403: self._key_hint()}.get(status, "")
            what = "no words" if not said else "" if said == response.reason else said
            raise HTTPCallError(f"{begin}{f': {what}' if what else ''}{why}", url, status, status >= 500)
        try:
            return exchange.read(answer)
        except UnexpectedAnswer as expected:
            kind = response.headers.get("Content-Type", "no content type")
            text = f"{begin}: not the answer expected, which is {expected}, but {kind}: {said or 'an empty body'}"
            raise HTTPCallError(text, url, status, True) from None

    def _key_hint(self) -> str:
        return " (no api_key was given)" if self._api_key is None else " (the api_key given was not accepted)"

    def _masked(self, text: str) -> str:
        return text if self._api_key is None else text.replace(self._api_key.value, str(self._api_key))


class _Bearer(requests.auth.AuthBase):
    """Given even without a token: requests would otherwise take credentials from ``~/.netrc``."""

    def __init__(self, key: Secret | None) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key.value}"
        return request


def _parsed(response: requests.Response) -> Any:
    if not response.content:
        return NOTHING
    try:
        return json.loads(response.content)
    except ValueError:
        return None  # no JSON: no reader accepts it, and the error shows the text


def _server_words(response: requests.Response, answer: Any) -> str:
    """What the server says went wrong: vLLM's ``{"error": {"message"}}``, FastAPI's ``{"detail"}``, else the start of the body."""
    text = " ".join(response.text.split())
    if isinstance(answer, dict):
        error, detail = answer.get("error"), answer.get("detail")
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            text = error["message"]
        elif isinstance(error, str):
            text = error
        elif isinstance(detail, str):
            text = detail
        elif isinstance(detail, list):
            text = "; ".join(_complaint(each) for each in detail)
    text = workers_words(text)
    return text if len(text) <= MAX_BODY_CHARS else f"{text[:MAX_BODY_CHARS]} [...]"


def _complaint(each: Any) -> str:
    """One entry of FastAPI's list of what is wrong with a request."""
    if isinstance(each, dict) and isinstance(each.get("loc"), list) and "msg" in each:
        return f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
    return str(each)
