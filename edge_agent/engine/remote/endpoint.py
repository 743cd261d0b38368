"""What an OpenAI-compatible endpoint is and says: its models, its key, its failures."""

import datetime
import email.utils
import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import anyio

from edge_agent.errors import EngineError, EngineFailure

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]

_LOOK_SECONDS: Final = 15.0
_MAX_LISTING_BYTES: Final = 8_000_000


class RemoteIssue(enum.Enum):
    """What is wrong with an endpoint, as operators see it."""

    UNREACHABLE = "remote_unreachable"
    MISCONFIGURED = "remote_misconfigured"
    KEY_UNUSABLE = "remote_key_unusable"
    KEY_REFUSED = "remote_key_refused"
    QUOTA_EXHAUSTED = "remote_quota_exhausted"
    MODEL_MISSING = "remote_model_missing"
    STALLED = "remote_stalled"
    FAILED = "remote_failed"


class ServerKind(enum.Enum):
    """Whose ways with formats a server has; by `owned_by` in its list of models."""

    LLAMA_SERVER = "llamacpp"
    VLLM = "vllm"
    OTHER = ""


class RemoteError(EngineError):
    """An endpoint failed.

    Attributes:
        issue: what is wrong with it.
        is_down: False when only this one answer failed.
    """

    def __init__(self, issue: RemoteIssue, message: str, is_down: bool = True) -> None:
        stalled = issue is RemoteIssue.STALLED
        super().__init__(EngineFailure.STALLED if stalled else EngineFailure.CRASHED, message)
        self.issue = issue
        self.is_down = is_down

    @property
    def issue_name(self) -> str:
        """See `AgentError.issue_name`."""
        return self.issue.value


@dataclass(frozen=True, slots=True)
class Listing:
    """What an endpoint says of a model; `context_tokens` is None when it does not say."""

    model: str
    context_tokens: int | None
    server: ServerKind = ServerKind.OTHER


def new_client(connections: int, connect_seconds: float) -> "httpx.AsyncClient":
    """An HTTP client without deadlines of its own but for connecting and sending.

    Redirects are not followed, for they would carry the key elsewhere. Proxies and certificates
    of authorities come from the environment (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE).
    """
    import httpx

    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=connect_seconds, write=30.0),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        follow_redirects=False,
    )


def read_api_key(path: str, variable: str, environ: Mapping[str, str]) -> str | None:
    """The key from a file or an environment variable; None when neither is named.

    Raises:
        RemoteError: it cannot be read or is no key; the text never shows it.
    """
    if path:
        try:
            key = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise RemoteError(
                RemoteIssue.KEY_UNUSABLE,
                f"The API key file {path} cannot be read: {reason}; let the agent's user read it.",
            ) from None
    elif variable:
        key = environ.get(variable, "").strip()
    else:
        return None
    if not key or not all("!" <= character <= "~" for character in key):
        raise RemoteError(
            RemoteIssue.KEY_UNUSABLE,
            f"{path or 'The environment variable ' + variable} holds no API key: one line of"
            " visible ASCII characters is needed.",
        )
    return key


async def look(
    client: "httpx.AsyncClient",
    base_url: str,
    model: str,
    headers: Callable[[], dict[str, str]],
) -> Listing:
    """Find an endpoint and a model there: by /models, else, by /health, the endpoint alone.

    Args:
        base_url: without a slash at its end.
        model: empty takes the only one.
        headers: with the key, if there is one.

    Raises:
        RemoteError: there is no such endpoint or model; says what to do.
    """
    import httpx

    with anyio.move_on_after(_LOOK_SECONDS):
        try:
            return await _look(client, base_url, model, headers())
        except httpx.HTTPError as error:
            raise connection_failed(base_url, error) from error
    raise RemoteError(
        RemoteIssue.UNREACHABLE, f"{base_url} did not list its models within {_LOOK_SECONDS:g} s."
    )


async def _look(
    client: "httpx.AsyncClient", base_url: str, model: str, headers: dict[str, str]
) -> Listing:
    status, body = await _get(client, f"{base_url}/models", headers)
    if status in (404, 405, 501):
        status, _ = await _get(client, f"{base_url.removesuffix('/v1')}/health", headers)
        if status == 200 and model:
            return Listing(model, None)
        if status == 200:
            raise RemoteError(
                RemoteIssue.MISCONFIGURED, f"{base_url} does not list its models; set remote.model."
            )
        raise RemoteError(
            RemoteIssue.MISCONFIGURED,
            f"There is no OpenAI-compatible server at {base_url}; base_url usually ends in /v1.",
        )
    if status != 200:
        error = error_object(body)
        failure = endpoint_failure(status, error.get("code"), base_url)
        raise failure or RemoteError(
            RemoteIssue.UNREACHABLE, f"{base_url} answers with HTTP status {status}."
        )
    found = _listed(body, base_url)
    if model in found:
        return found[model]
    if not model and len(found) == 1:
        return next(iter(found.values()))
    if model and await _has_unlisted(client, f"{base_url}/models/{quote(model)}", headers):
        return Listing(model, None)
    names = ", ".join(sorted(found)[:20]) or "none"
    wanted = f"no model {model!r}" if model else "more than one model or none; set remote.model"
    raise RemoteError(RemoteIssue.MODEL_MISSING, f"{base_url} has {wanted}. It lists: {names}.")


async def _has_unlisted(client: "httpx.AsyncClient", url: str, headers: dict[str, str]) -> bool:
    """Whether a server knows a name that it does not list, such as an alias."""
    status, _ = await _get(client, url, headers)
    return status == 200


async def _get(client: "httpx.AsyncClient", url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    async with client.stream("GET", url, headers=headers) as response:
        return response.status_code, await read_body(response, _MAX_LISTING_BYTES)


def _listed(body: bytes, base_url: str) -> dict[str, Listing]:
    """The models in a list by their names; vLLM and Pointsman say the context."""
    owners = {kind.value: kind for kind in ServerKind}
    try:
        entries = json.loads(body)["data"] or ()
        return {
            str(entry["id"]): Listing(
                str(entry["id"]),
                positive_or_none(
                    entry.get("max_model_len")
                    or (entry.get("pointsman") or {}).get("context_tokens")
                    or entry.get("context_length")
                ),
                owners.get(str(entry.get("owned_by")), ServerKind.OTHER),
            )
            for entry in entries
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RemoteError(
            RemoteIssue.MISCONFIGURED,
            f"{base_url}/models is no list of models; is it an OpenAI-compatible server?",
        ) from None


def endpoint_failure(
    status: int, code: object, who: str, key_source: str = ""
) -> RemoteError | None:
    """What is wrong with an endpoint by the status of a response; None when it is the request.

    Args:
        code: of the response's error object.
        who: the endpoint, as the sentence names it.
        key_source: the file or variable that the key is from.
    """
    where = f" in {key_source}" if key_source else " (api_key_file or api_key_env)"
    if status in (401, 403):
        return RemoteError(
            RemoteIssue.KEY_REFUSED,
            f"The endpoint refuses the API key with HTTP status {status}; put a valid one{where}.",
        )
    if status == 402 or (status == 429 and code == "insufficient_quota"):
        return RemoteError(
            RemoteIssue.QUOTA_EXHAUSTED,
            "The endpoint's account has no credit left; top it up, or use another key.",
        )
    if status == 404:
        return RemoteError(
            RemoteIssue.MODEL_MISSING, f"HTTP status 404: {who}. Check base_url and remote.model."
        )
    if 300 <= status < 400:
        return RemoteError(
            RemoteIssue.MISCONFIGURED, f"HTTP status {status}: {who} has moved; correct base_url."
        )
    return None


def connection_failed(base_url: str, error: Exception) -> RemoteError:
    """An HTTP exchange that did not come to its end, in words."""
    import httpx

    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        text = f"{base_url} does not answer; is it running, and does a firewall let it pass?"
    elif isinstance(error, httpx.ConnectError):
        text = f"{base_url} cannot be reached ({error}); is it running?"
    else:
        text = f"The connection to {base_url} broke ({type(error).__name__})."
    return RemoteError(RemoteIssue.UNREACHABLE, text)


async def read_body(response: "httpx.Response", limit: int) -> bytes:
    """The first bytes of a response's body."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > limit:
            break
    return bytes(body[:limit])


def error_object(body: bytes) -> Json:
    """The error that a body tells of; empty when it tells of none."""
    try:
        data = json.loads(body)
    except ValueError:
        return {}
    if not isinstance(data, dict):
        return {}
    error = data.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str):  # Ollama's own interface
        return {"message": error}
    return data if data.get("object") == "error" else {}  # vLLM before 0.10


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds them or a date; None without a meaning."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            then = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        if then.tzinfo is None:
            then = then.replace(tzinfo=datetime.timezone.utc)
        seconds = (then - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def positive_or_none(value: object) -> int | None:
    """A whole number above 0; None for anything else."""
    return value if isinstance(value, int) and value > 0 else None
