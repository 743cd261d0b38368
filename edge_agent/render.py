"""Tables for people."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # `status` needs neither, and should start fast
    from edge_agent.bench import BenchReport
    from edge_agent.findings import Finding


def console(stderr: bool = False) -> Console:
    """A console that does not wrap tables when it is piped."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 140, highlight=False)


def print_status(status: dict[str, Any]) -> None:
    """The object of `edge-agent status --json`, for people."""
    out = console()

    def say(text: str) -> None:
        # Not wrapped: a line that is searched for or copied stays whole.
        out.print(text, markup=False, soft_wrap=True)

    out.print(f"[bold]{status['node_id']}[/bold] is {status['state']}; {_link(status)}")
    if status["health"]:
        say(f"{status['hardware']}: {', '.join(_health(status['health']))}")
    if status["models"]:
        out.print(_models(status["models"]))
    memory = status["memory"]
    if memory["reserved_bytes"]:
        say(
            f"models hold {memory['reserved_bytes'] / 1e6:.0f} MB of a budget of "
            f"{memory['budget_bytes'] / 1e6:.0f} MB"
        )
    for text in (*_requests(status["requests"]), *_energy(status["energy"])):
        say(text)
    for model in status["models"]:
        if model["phase"] not in ("ready", "failed") and model["issue"]:
            say(f"{model['name']}: {model['issue']}")
    for issue in status["issues"]:
        say(f"issue: {issue}")


def _link(status: dict[str, Any]) -> str:
    controller = status["controller"]
    if not controller["is_connected"]:
        return f"not connected to {controller['address'] or 'any controller'}"
    return f"connected to {controller['address']} for {_ago(controller['connected_seconds'])}"


def _health(health: dict[str, Any]) -> list[str]:
    parts = [f"CPU {100 * health['cpu_utilisation_ratio']:.0f} %"]
    if health["gpu_utilisation_ratio"] is not None:
        parts.append(f"GPU {100 * health['gpu_utilisation_ratio']:.0f} %")
    parts.append(f"{health['memory_available_bytes'] / 1e9:.1f} GB free")
    if health["temperature_celsius"] is not None:
        parts.append(f"{health['temperature_celsius']:.0f} °C")
    if health["is_throttled"]:
        limits = ", ".join(health["limits"])
        parts.append(f"throttled ({limits})" if limits else "throttled")
    if health["power_watts"] is not None:
        how = [health["power_source"]]
        if health.get("power_coverage") is not None:
            how.append(health["power_coverage"])
        if health.get("power_relative_error") is not None:
            how.append(f"±{100 * health['power_relative_error']:.0f} %")
        parts.append(f"{health['power_watts']:.1f} W ({', '.join(how)})")
    if health["power_mode"]:
        parts.append(f"power mode {health['power_mode']}")
    return parts


def _models(models: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("model", "phase", "slots", "queued", "one tok/s", "all tok/s", "memory MB"):
        table.add_column(name, overflow="fold")
    for model in models:
        table.add_row(
            model["name"] + (" (pinned)" if model["is_pinned"] else ""),
            _phase(model),
            f"{model['busy_slots']}/{model['slots']}",
            str(model["queued_requests"]),
            _number(model["decode_tokens_per_second"]),
            _number(model["saturated_decode_tokens_per_second"]),
            _number(model["resident_bytes"] and model["resident_bytes"] / 1e6),
        )
    return table


def _requests(requests: dict[str, Any]) -> list[str]:
    apart = ""
    if requests["prefill_joules"] or requests["decode_joules"]:
        apart = (
            f"; {requests['prefill_joules']:.0f} J for prompts, "
            f"{requests['decode_joules']:.0f} J for answers"
        )
    counts = (
        f"{requests['running']} running, {requests['completed']} answered, "
        f"{requests['failed']} failed; {requests['energy_joules']:.0f} J "
        f"({requests['energy_source']}{apart})"
    )
    return [counts, *(f"  {_completion(entry)}" for entry in requests["recent"][:5])]


def _completion(entry: dict[str, Any]) -> str:
    parts = [
        f"{entry['request_id']}: {entry['outcome']}",
        f"{entry['completion_tokens']} tokens in {entry['total_seconds']:.2f} s",
        entry["model"],
    ]
    if entry["energy_joules"] is not None:
        parts.append(f"{entry['energy_joules']:.1f} J")
    if entry.get("ended_seconds_ago") is not None:  # an older agent does not say
        parts.append(f"{_ago(entry['ended_seconds_ago'])} ago")
    if entry["message"]:
        parts.append(entry["message"])
    return ", ".join(parts)


def _energy(energy: dict[str, Any]) -> list[str]:
    if not energy["total_joules"]:
        return []
    measured, estimated = energy["measured_seconds"], energy["estimated_seconds"]
    return [
        f"energy since the start: {energy['total_joules']:.0f} J = "
        f"{energy['requests_joules']:.0f} J answers + {energy['idle_joules']:.0f} J idle; "
        f"{100 * measured / (measured + estimated):.0f} % of the time measured",
        f"energy today: {energy['today_joules']:.0f} J",
    ]


def print_findings(findings: "Sequence[Finding]") -> None:
    """What the doctor found."""
    out = console()
    marks = {"ok": "[green]ok[/green]     ", "warning": "[yellow]warning[/yellow]"}
    for finding in findings:
        out.print(f"{marks.get(finding.level, '[red]error[/red]  ')} {finding.check}: ", end="")
        out.print(finding.text, markup=False, soft_wrap=True)
        if finding.fix:
            out.print(f"        fix: {finding.fix}", markup=False, soft_wrap=True)


def print_bench(report: "BenchReport") -> None:
    """What `edge-agent bench` measured."""
    out = console()
    out.print(
        f"{report.model} ({report.description}), {report.threads} threads, {report.slots} slots: "
        f"loaded in {report.load_seconds:.1f} s, reads {report.prefill_tokens_per_second:.0f} "
        "tokens/s"
    )
    table = Table()
    for name in ("sequences", "tokens/s together", "times one alone"):
        table.add_column(name, justify="right")
    for rate in report.decode:
        table.add_row(str(rate.sequences), f"{rate.tokens_per_second:.1f}", f"{rate.ratio:.2f}")
    out.print(table)


def _phase(model: dict[str, Any]) -> str:
    ratio = model.get("progress_ratio")
    return str(model["phase"]) + ("" if ratio is None else f" {100 * ratio:.0f} %")


def _ago(seconds: float) -> str:
    """A duration in the largest unit that fits, such as "90 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
