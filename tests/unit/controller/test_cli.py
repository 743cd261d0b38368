"""What the command line refuses before it asks any controller."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from google.protobuf.json_format import ParseDict

from controller.cli import main
from controller.commands.lazy import LazyGroup, Place
from controller.commands.target import to_json
from controller.lab.commands.bench import bench
from controller.lab.commands.group import lab
from pointsman.v1 import admin_pb2, router_pb2, types_pb2

NOWHERE = ["--controller", "127.0.0.1:1", "--insecure"]
BAD_BYTES = "caf\udce9"
"""How Python presents an argument with the byte 0xE9 in it."""


def run(*arguments: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["infer", BAD_BYTES],
        ["infer", "Hello", "--model", BAD_BYTES],
        ["infer", "Hello", "--system", BAD_BYTES],
        ["infer", "Hello", "--stop", BAD_BYTES],
        ["infer", "Hello", "--request-id", BAD_BYTES],
        ["route", BAD_BYTES],
        ["route", "Hello", "--model", BAD_BYTES],
        ["route", "Hello", "--policy", BAD_BYTES],
        ["explain", BAD_BYTES],
        ["nodes", "drain", BAD_BYTES],
        ["nodes", "undrain", BAD_BYTES],
        ["nodes", "forget", BAD_BYTES],
        ["policy", "set", BAD_BYTES],
        ["policy", "set", "--normalisation", BAD_BYTES],
    ],
)
def test_argument_that_is_not_utf8_is_wrong_usage(arguments: list[str]) -> None:
    command = arguments[0]
    options = NOWHERE if command in ("infer", "route", "explain") else []
    group = NOWHERE if command in ("nodes", "policy") else []
    result = run(command, *group, *arguments[1:], *options)
    assert result.exit_code == 2
    assert "not valid UTF-8" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["infer", "Hello", "--max-tokens", "99999999999"],
        ["infer", "Hello", "--top-k", "-99999999999"],
        ["infer", "Hello", "--seed", "-1"],
        ["infer", "Hello", "--seed", str(2**64)],
        ["infer", "Hello", "--temperature", "warm"],
        ["route", "Hello", "--max-tokens", "99999999999"],
        ["route", "Hello", "--weights", "1,2,3"],
        ["route", "Hello", "--weights", "1,2,3,x"],
        ["route"],
        ["policy", "set"],
        ["policy", "set", "--weights", ""],
        ["explain"],
        ["infer"],
    ],
)
def test_arguments_that_cannot_be_are_wrong_usage(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.strip()
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\xff\n", "line 2: not valid UTF-8"),
        (b'{"prompt": 5}\n', "line 2: "),
        (b'{"promt": "Hello"}\n', "line 2: "),
        (b'{"prompt": "Hello"\n', "line 2: "),
    ],
)
def test_bad_line_of_a_batch_file_is_numbered(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "batch.txt"
    path.write_bytes(b"A good question?\n" + line)
    result = run("route", "--file", str(path), *NOWHERE)
    assert result.exit_code == 2
    assert problem in result.output


def test_nobody_at_the_address_is_told_with_the_next_thing_to_try() -> None:
    result = run("nodes", *NOWHERE)
    assert result.exit_code == 1
    assert "no controller answers at 127.0.0.1:1" in result.output
    assert "edge-controller serve" in result.output


def test_authority_file_that_is_missing_is_named(tmp_path: Path) -> None:
    result = run("nodes", "--ca-file", str(tmp_path / "ca.pem"))
    assert result.exit_code == 1
    assert "ca.pem: No such file" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--window-seconds", "-1"],
        ["--weights", "0,0,0,0"],
        ["--weights", "1,2"],
        ["--listen", "nowhere"],
        ["--http-listen", "nowhere"],
        ["--tls-cert-file", "only.pem"],
        ["--config", "missing.toml"],
        ["--policy", "roundrobin", "--insecure"],
    ],
)
def test_controller_does_not_start_with_wrong_settings(
    tmp_path: Path, arguments: list[str]
) -> None:
    result = run("serve", "--data-dir", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")


def test_unknown_policy_at_the_start_lists_what_there_is(tmp_path: Path) -> None:
    result = run("serve", "--data-dir", str(tmp_path), "--insecure", "--policy", "roundrobin")
    assert "Did you mean 'round-robin'?" in result.output
    assert "memetic" in result.output


def test_json_has_every_field_and_reads_back() -> None:
    message = admin_pb2.GetPolicyResponse(policy="memetic")
    shown = to_json(message)
    assert shown["window_seconds"] == 0.0
    assert shown["available_policies"] == []
    assert ParseDict(json.loads(json.dumps(shown)), admin_pb2.GetPolicyResponse()) == message


def test_json_leaves_out_what_is_unknown() -> None:
    usage = to_json(types_pb2.Usage(prompt_tokens=3))
    assert "energy_joules" not in usage
    assert usage["prompt_tokens"] == 3
    assert "chosen" not in to_json(router_pb2.Placement(request_id="r1"))


@pytest.mark.parametrize("name", ["demo", "profile", "bench", "train"])
def test_a_command_that_moved_says_where_it_is(name):
    ended = CliRunner().invoke(main, [name, "--help"])
    assert ended.exit_code == 2
    assert f"lab {name}" in ended.output
    assert CliRunner().invoke(main, ["lab", name, "--help"]).exit_code == 0


def test_each_command_of_the_tables_can_be_imported():
    for group in (main, lab, bench):
        context = click.Context(group)
        assert all(group.get_command(context, name) for name in group.list_commands(context))
    assert lab.get_command(click.Context(lab), "nothing") is None


@pytest.mark.parametrize("group", [main, lab, bench], ids=lambda group: group.name)
def test_line_of_each_command_in_the_help_is_the_beginning_of_its_own_help(
    group: click.Group,
) -> None:
    context = click.Context(group, terminal_width=1000, max_content_width=1000)
    formatter = context.make_formatter()
    group.format_commands(context, formatter)
    listed = [line.split(maxsplit=1) for line in formatter.getvalue().splitlines() if "  " in line]
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    assert listed == [
        [name, command.get_short_help_str(900)] for name, command in commands.items() if command
    ]
    assert len(listed) == len(commands)


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from controller.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'grpc', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_command_that_lacks_a_package_says_which_extra_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lacking_command.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    group = LazyGroup("tool", places={"draw": Place("lacking_command:draw", "Draw.")})
    result = CliRunner().invoke(group, ["draw"])
    assert result.exit_code == 1
    assert "tool draw needs the package no_such_package" in result.output
    assert "extra `train`" in result.output
