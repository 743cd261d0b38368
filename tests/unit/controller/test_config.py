import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from controller.config import Settings, SettingsError, load_settings


def load(tmp_path: Path, text: str, **environ: str) -> Settings:
    path = tmp_path / "controller.toml"
    path.write_text(text, encoding="utf-8")
    return load_settings(path, environ)


def problems_of(tmp_path: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(SettingsError) as failure:
        load(tmp_path, text, **environ)
    return str(failure.value).splitlines()


def test_defaults_need_no_file() -> None:
    settings = load_settings(None, {})
    assert settings.batching.window_seconds == 1.0
    assert settings.batching.max_requests == 128
    assert settings.server.insecure is False
    assert settings.server.data_dir.is_absolute()


def test_file_is_overridden_by_environment_and_that_by_flags(tmp_path: Path) -> None:
    path = tmp_path / "controller.toml"
    path.write_text(
        "[batching]\nwindow_seconds = 2\nmax_requests = 5\nquiet_seconds = 0.5\n", encoding="utf-8"
    )
    settings = load_settings(
        path,
        {
            "POINTSMAN_BATCHING_MAX_REQUESTS": "6",
            "POINTSMAN_BATCHING_QUIET_SECONDS": "0.6",
            "POINTSMAN_CONTROLLER": "the client's own",
            "HOME": "/root",
        },
        {("batching", "quiet_seconds"): 0.7, ("batching", "max_attempts"): None},
    )
    assert settings.batching.window_seconds == 2.0
    assert settings.batching.max_requests == 6
    assert settings.batching.quiet_seconds == 0.7
    assert settings.batching.max_attempts == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("1", True), ("Yes", True), ("false", False), ("0", False), ("no", False)],
)
def test_environment_spells_flags_as_words(text: str, expected: bool) -> None:
    assert load_settings(None, {"POINTSMAN_SERVER_INSECURE": text}).server.insecure is expected


def test_lists_come_as_arrays_or_separated_by_commas(tmp_path: Path) -> None:
    text = '[routing]\nweights = [1, 0, 0, 1]\n[server]\ntls_names = ["a.example"]\n'
    settings = load(tmp_path, text, POINTSMAN_SERVER_TLS_NAMES="b.example, 10.0.0.1")
    assert settings.routing.weights == (1.0, 0.0, 0.0, 1.0)
    assert settings.server.tls_names == ("b.example", "10.0.0.1")


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    text = """
    stray = 1
    [batchin]
    x = 1
    [batching]
    max_requests = "many"
    window_secnds = 1
    quiet_seconds = -1
    [server]
    insecure = "perhaps"
    [routing]
    normalisation = "none"
    """
    problems = "\n".join(problems_of(tmp_path, text, POINTSMAN_LIMITS_TOTAL_SECONDS="0"))
    for part in (
        "stray",
        "[batchin]: no such section; did you mean 'batching'?",
        "batching.max_requests: must be a whole number, not 'many'",
        "batching.window_secnds: no such setting; did you mean 'window_seconds'?",
        "quiet_seconds",
        "server.insecure: must be true or false, not 'perhaps'",
        "routing.normalisation",
        "total_seconds",
    ):
        assert part in problems


def test_setting_like_no_other_is_told_what_there_is(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, "[fleet]\nzzz = 1\n")
    assert problem == (
        "fleet.zzz: no such setting; there are: health_interval_seconds, lease_seconds, "
        "probe_interval_seconds, goodput_interval_seconds"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[server]\nlisten = "nowhere"\n', "server.listen"),
        ('[server]\nlisten = ":50551"\n', "server.listen"),
        ('[server]\nlisten = "127.0.0.1:99999"\n', "server.listen"),
        ('[server]\nhttp_listen = "127.0.0.1"\n', "server.http_listen"),
        ('[server]\nhttp_listen = "127.0.0.1:http"\n', "server.http_listen"),
        ('[server]\ntls_cert_file = "a.pem"\n', "belong together"),
        ('[server]\nlog_level = "loud"\n', "server.log_level"),
        ("[server]\ngrace_seconds = -1\n", "server.grace_seconds"),
        ("[server]\nlisten = 5\n", "server.listen: must be text"),
        ("[batching]\nwindow_seconds = -0.1\n", "batching.window_seconds"),
        ("[batching]\nwindow_seconds = nan\n", "batching.window_seconds"),
        ("[batching]\nwindow_seconds = inf\n", "batching.window_seconds"),
        ("[batching]\nwindow_seconds = true\n", "batching.window_seconds"),
        ('[batching]\nwindow_seconds = "soon"\n', "must be a number, not 'soon'"),
        ("[batching]\nquiet_seconds = nan\n", "batching.quiet_seconds"),
        ("[batching]\nmax_requests = 0\n", "batching.max_requests"),
        ("[batching]\nmax_requests = 1.5\n", "must be a whole number, not 1.5"),
        ("[batching]\nmax_waiting_requests = 0\n", "batching.max_waiting_requests"),
        ("[batching]\nmax_attempts = 0\n", "batching.max_attempts"),
        ("[routing]\nweights = [1, 1, 1]\n", "routing.weights: four numbers"),
        ("[routing]\nweights = [0, 0, 0, 0]\n", "a sum above 0"),
        ("[routing]\nweights = [-1, 1, 1, 1]\n", "none negative"),
        ("[routing]\nweights = [nan, 1, 1, 1]\n", "routing.weights"),
        ('[routing]\nweights = "1,x,1,1"\n', "routing.weights"),
        ("[routing]\nweights = 5\n", "routing.weights: must be a list"),
        ("[routing]\nbudget_seconds = 0\n", "routing.budget_seconds"),
        ("[routing]\nseed = -1\n", "routing.seed"),
        ("[fleet]\nlease_seconds = 1\nhealth_interval_seconds = 1\n", "fleet.lease_seconds"),
        ("[fleet]\nprobe_interval_seconds = 0\n", "fleet.probe_interval_seconds"),
        ("[limits]\nfirst_token_seconds = nan\n", "limits.first_token_seconds"),
        ("[limits]\nmax_prompt_bytes = 0\n", "limits.max_prompt_bytes"),
        ("[limits]\nmax_buffered_bytes = 0\n", "limits.max_buffered_bytes"),
        ("[limits]\nkept_records = -1\n", "limits.kept_records"),
        ("[gateway]\nmax_body_bytes = 0\n", "gateway.max_body_bytes"),
        ("[gateway]\nbody_seconds = 0\n", "gateway.body_seconds"),
        ("[gateway]\nhold_seconds = -1\n", "gateway.hold_seconds"),
        ("[gateway]\nkeep_alive_seconds = 0\n", "gateway.keep_alive_seconds"),
        ("[gateway]\nwrite_seconds = inf\n", "gateway.write_seconds"),
    ],
)
def test_wrong_value_is_refused_by_its_name(tmp_path: Path, text: str, named: str) -> None:
    (problem,) = problems_of(tmp_path, text)
    assert named in problem


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::1]:50551", "controller.example:1"])
def test_addresses_are_taken_as_they_are_usually_written(listen: str) -> None:
    settings = load_settings(None, {}, {("server", "listen"): listen})
    assert settings.server.listen == listen
    assert load_settings(None, {"POINTSMAN_SERVER_HTTP_LISTEN": ""}).server.http_listen == ""


def test_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.toml: cannot be read: No such file"):
        load_settings(tmp_path / "missing.toml", {})
    (tmp_path / "bad.toml").write_bytes(b"[server\n")
    with pytest.raises(SettingsError, match=r"bad\.toml: not valid TOML"):
        load_settings(tmp_path / "bad.toml", {})
    (tmp_path / "latin.toml").write_bytes(b"x = '\xe9'\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings(tmp_path / "latin.toml", {})


def described(cls: type[Any]) -> dict[str, str]:
    _, _, section = (cls.__doc__ or "").partition("Attributes:")
    return dict(re.findall(r"^ {8}(\w+): (\S.*)$", section, re.MULTILINE))


@pytest.mark.parametrize("section", [f.name for f in dataclasses.fields(Settings)])
def test_every_setting_has_its_sentence(section: str) -> None:
    cls = type(getattr(Settings(), section))
    assert list(described(cls)) == [f.name for f in dataclasses.fields(cls)]
