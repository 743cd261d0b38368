"""Tables for people."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # `status` needs neither, and should start fast
    from edge_agent.bench import BenchReport
    from edge_agent.doctor import Finding


def console(stderr: bool = False) -> Console:
    """A console that does not wrap tables when it is piped."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 140, highlight=False)


def print_status(status: dict[str, Any]) -> None:
    """The object of `edge-agent status --json`, for people."""
    out = console()
    controller = status["controller"]
    link = (
        f"connected to {controller['address']} for {controller['connected_seconds']:.0f} s"
        if controller["is_connected"]
        else f"not connected to {controller['address'] or 'any controller'}"
    )
    out.print(f"[bold]{status['node_id']}[/bold] is {status['state']}; {link}")
    health = status["health"]
    if health:
        parts = [
            f"CPU {100 * health['cpu_utilisation_ratio']:.0f} %",
            f"{health['memory_available_bytes'] / 1e9:.1f} GB free",
        ]
        if health["temperature_celsius"] is not None:
            parts.append(f"{health['temperature_celsius']:.0f} °C")
        if health["is_throttled"]:
            limits = ", ".join(health.get("limits", ()))
            parts.append(f"throttled ({limits})" if limits else "throttled")
        if health["power_watts"] is not None:
            covers = health.get("power_coverage")
            source = health["power_source"] + (f", {covers}" if covers else "")
            parts.append(f"{health['power_watts']:.1f} W ({source})")
        if health.get("gpu_utilisation_ratio") is not None:
            parts.insert(1, f"GPU {100 * health['gpu_utilisation_ratio']:.0f} %")
        if health.get("power_mode"):
            parts.append(f"power mode {health['power_mode']}")
        out.print(f"{status['hardware']}: {', '.join(parts)}")
    table = Table()
    for name in ("model", "phase", "slots", "queued", "one tok/s", "all tok/s", "memory MB"):
        table.add_column(name, overflow="fold")
    for model in status["models"]:
        table.add_row(
            model["name"] + (" (pinned)" if model.get("is_pinned") else ""),
            _phase(model),
            f"{model['busy_slots']}/{model['slots']}",
            str(model["queued_requests"]),
            _number(model["decode_tokens_per_second"]),
            _number(model["saturated_decode_tokens_per_second"]),
            _number(model["resident_bytes"] and model["resident_bytes"] / 1e6),
        )
    if status["models"]:
        out.print(table)
    memory = status.get("memory")
    if memory and memory["reserved_bytes"]:
        out.print(
            f"models hold {memory['reserved_bytes'] / 1e6:.0f} MB of a budget of "
            f"{memory['budget_bytes'] / 1e6:.0f} MB"
        )
    requests = status["requests"]
    out.print(
        f"{requests['running']} running, {requests['completed']} answered, "
        f"{requests['failed']} failed; {requests['energy_joules']:.0f} J "
        f"({requests['energy_source']}"
        + (
            f"; {requests['prefill_joules']:.0f} J for prompts, "
            f"{requests['decode_joules']:.0f} J for answers)"
            if requests.get("prefill_joules") or requests.get("decode_joules")
            else ")"
        )
    )
    energy = status.get("energy")
    if energy and energy["total_joules"]:
        measured, estimated = energy["measured_seconds"], energy["estimated_seconds"]
        out.print(
            f"energy since the start: {energy['total_joules']:.0f} J = "
            f"{energy['requests_joules']:.0f} J answers + {energy['idle_joules']:.0f} J idle; "
            f"{100 * measured / (measured + estimated):.0f} % of the time measured"
        )
        if energy.get("today_joules") is not None:
            out.print(f"energy today: {energy['today_joules']:.0f} J")
    for entry in requests["recent"][:5]:
        out.print(
            f"  {entry['request_id']}: {entry['outcome']}, {entry['completion_tokens']} tokens in "
            f"{entry['total_seconds']:.2f} s {entry['message']}",
            markup=False,
        )
    for model in status["models"]:
        if model["phase"] not in ("ready", "failed") and model["issue"]:
            out.print(f"{model['name']}: {model['issue']}", markup=False)
    for issue in status["issues"]:
        out.print(f"issue: {issue}", markup=False)


def print_findings(findings: "Sequence[Finding]") -> None:
    """What the doctor found."""
    out = console()
    marks = {"ok": "[green]ok[/green]     ", "warning": "[yellow]warning[/yellow]"}
    for finding in findings:
        out.print(f"{marks.get(finding.level, '[red]error[/red]  ')} {finding.check}: ", end="")
        out.print(finding.text, markup=False)
        if finding.fix:
            out.print(f"        fix: {finding.fix}", markup=False)


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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
