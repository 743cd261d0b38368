import datetime
import email.utils
from pathlib import Path

import pytest

from edge_agent.engine.remote.endpoint import (
    RemoteError,
    RemoteIssue,
    endpoint_failure,
    error_object,
    read_api_key,
    retry_after_seconds,
)


def test_key_comes_from_its_file_or_its_variable(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  sk-file\n")
    assert read_api_key(str(file), "", {}) == "sk-file"
    assert read_api_key("", "KEY", {"KEY": "sk-variable"}) == "sk-variable"
    assert read_api_key("", "", {"KEY": "sk-variable"}) is None


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "h\u00e9llo"])
def test_what_is_no_key_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    """O5."""
    file = tmp_path / "key"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(RemoteError) as caught:
        read_api_key(str(file), "", {})
    assert caught.value.issue is RemoteIssue.KEY_UNUSABLE
    assert str(file) in str(caught.value)
    assert not content.strip() or content.split()[0] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_missing_key_is_told_by_where_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"missing cannot be read: No such file"):
        read_api_key(str(tmp_path / "missing"), "", {})
    with pytest.raises(RemoteError, match="environment variable KEY holds no API key"):
        read_api_key("", "KEY", {})


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("soon", None), ("nan", None)],
)
def test_retry_after_is_read(value: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(value) == seconds


def test_retry_after_may_be_a_date() -> None:
    then = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=3600)
    seconds = retry_after_seconds(email.utils.format_datetime(then, usegmt=True))
    assert seconds is not None
    assert 3000 < seconds <= 3600
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "openai"}}', "openai"),
        (b'{"error": "ollama"}', "ollama"),
        (b'{"object": "error", "message": "vllm", "code": 400}', "vllm"),
        (b'{"detail": "Not Found"}', None),
        (b"404 page not found", None),
        (b"[1]", None),
        (b"\xff", None),
    ],
)
def test_error_objects_of_several_servers_are_understood(body: bytes, message: str | None) -> None:
    assert error_object(body).get("message") == message


@pytest.mark.parametrize(
    ("status", "code", "issue"),
    [
        (401, None, RemoteIssue.KEY_REFUSED),
        (403, None, RemoteIssue.KEY_REFUSED),
        (402, None, RemoteIssue.QUOTA_EXHAUSTED),
        (429, "insufficient_quota", RemoteIssue.QUOTA_EXHAUSTED),
        (404, None, RemoteIssue.MODEL_MISSING),
        (308, None, RemoteIssue.MISCONFIGURED),
        (429, None, None),
        (400, None, None),
        (500, None, None),
    ],
)
def test_status_tells_what_is_wrong_with_the_endpoint(
    status: int, code: str | None, issue: RemoteIssue | None
) -> None:
    failure = endpoint_failure(status, code, "http://gpu/v1", "/etc/key")
    assert (failure.issue if failure else None) is issue
    if issue is RemoteIssue.KEY_REFUSED:
        assert "put a valid one in /etc/key" in str(failure)
