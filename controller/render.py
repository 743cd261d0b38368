"""Tables for people."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2


def console(stderr: bool = False) -> Console:
    """A console of 160 columns where nobody looks, and as wide as the terminal elsewhere."""
    # No markup: names and messages come from nodes and clients, and may look like tags.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 160
    return Console(stderr=stderr, width=width, highlight=False, markup=False)


def _quality_basis(candidate: router_pb2.Candidate) -> str:
    """Such as "57 neighbours" or "prior"."""
    count = candidate.quality_count
    return f"{count} {candidate.quality_source}" if count else candidate.quality_source


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}"


def _objective_line(decision: router_pb2.Decision) -> str:
    bound = ""
    if decision.HasField("lower_bound"):
        bound = f" (no assignment is below {decision.lower_bound:.4f})"
    fallback = f" [fell back: {decision.fallback_reason}]" if decision.fallback_reason else ""
    return (
        f"{decision.policy}: J {decision.objective:.4f}{bound}, quality loss "
        f"{decision.quality_loss:.3f}, {decision.cost_usd:.4g} USD, "
        f"{decision.energy_joules:.4g} J, done in {decision.completion_seconds:.3g} s; "
        f"decided in {decision.decision_milliseconds:.1f} ms{fallback}"
    )


def print_route(response: router_pb2.RouteResponse) -> None:
    """A dry run."""
    table = Table(title=None)
    for name in ("request", "node", "model", "quality", "joules", "USD", "done after s", "why not"):
        table.add_column(name, overflow="fold")
    for placement in response.placements:
        if placement.HasField("chosen"):
            chosen = placement.chosen
            table.add_row(
                placement.request_id,
                chosen.node_id,
                chosen.model,
                _number(chosen.quality_ratio),
                _number(chosen.energy_joules),
                _number(chosen.cost_usd),
                _number(chosen.finish_seconds),
                "",
            )
        else:
            reasons = "; ".join(
                f"{other.node_id}/{other.model}: {other.refusal}" for other in placement.others
            )
            table.add_row(placement.request_id, "-", "-", "-", "-", "-", "-", reasons)
    out = console()
    out.print(table)
    out.print(_objective_line(response.decision))


def print_account(account: router_pb2.Account) -> None:
    """One finished request, in a line on standard error."""
    usage = account.usage
    energy = ""
    if usage.HasField("energy_joules"):
        estimated = " estimated" if usage.energy_source == types_pb2.POWER_SOURCE_ESTIMATE else ""
        energy = f", {usage.energy_joules:.3g} J{estimated}"
    console(stderr=True).print(
        f"{account.request_id}: {account.model} on {account.node_id}; "
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, first after "
        f"{account.first_token_seconds:.2f} s, all after {account.total_seconds:.2f} s"
        f"{energy}",
        style="dim",
    )


def print_explanation(request_id: str, response: router_pb2.ExplainResponse) -> None:
    """Why a request went where it went."""
    out = console()
    out.print(f"{request_id}: {response.state}" + (f" ({response.error})" * bool(response.error)))
    if not response.HasField("decision"):
        out.print("Its window has not closed yet.")
        return
    decision, placement = response.decision, response.placement
    out.print(f"Batch {decision.batch_id} of {decision.batch_size}. {_objective_line(decision)}")
    table = Table()
    for name in (
        "",
        "node",
        "model",
        "quality",
        "joules",
        "USD",
        "alone s",
        "network s",
        "refused",
    ):
        table.add_column(name, overflow="fold")
    chosen = [placement.chosen] if placement.HasField("chosen") else []
    for mark, candidate in [("->", c) for c in chosen] + [("", c) for c in placement.others]:
        table.add_row(
            mark,
            candidate.node_id,
            candidate.model,
            f"{candidate.quality_ratio:.3f} ({_quality_basis(candidate)})",
            _number(candidate.energy_joules),
            _number(candidate.cost_usd),
            _number(candidate.latency_seconds)
            + f" ({candidate.latency_source})" * bool(candidate.latency_source),
            _number(candidate.network_seconds),
            candidate.refusal,
        )
    out.print(table)
    if decision.predictors:
        out.print(f"Fitted predictors: {decision.predictors}.")
    if response.HasField("account"):
        account = response.account
        if account.query_class:
            out.print(f"Class of the prompt: {account.query_class}.")
        out.print(
            f"Predicted to finish {account.predicted_finish_seconds:.2f} s after the window "
            f"closed; took {account.measured_finish_seconds:.2f} s."
        )


def print_nodes(response: admin_pb2.ListNodesResponse) -> None:
    """The fleet."""
    table = Table()
    columns = (
        "node,state,kind,hardware,models,CPU,power,RTT ms,to/from Mbit/s,backlog s,running,done,"
        "failed,cancelled"
    )
    for name in columns.split(","):
        table.add_column(name, overflow="fold")
    for node in response.nodes:
        health = node.health if node.HasField("health") else None
        power = "-"
        if health is not None and health.HasField("power_watts"):
            mark = "~" if health.power_source == types_pb2.POWER_SOURCE_ESTIMATE else ""
            power = f"{mark}{health.power_watts:.1f} W"
        if health is not None and health.is_throttled:
            power += " throttled"
        table.add_row(
            node.node_id,
            node.state,
            types_pb2.NodeKind.Name(node.attributes.kind).removeprefix("NODE_KIND_").lower(),
            node.attributes.hardware,
            ", ".join(model.name for model in node.models) or "-",
            "-" if health is None else f"{100 * health.cpu_utilisation_ratio:.0f} %",
            power,
            _number(1000 * node.round_trip_seconds) if node.HasField("round_trip_seconds") else "-",
            _goodput(node),
            _number(node.backlog_seconds),
            str(node.inflight_requests),
            str(node.completed_requests),
            str(node.failed_requests),
            str(node.cancelled_requests),
        )
    out = console()
    out.print(table if response.nodes else "No node has connected yet.")
    for node in response.nodes:
        for issue in node.health.issues:
            text = f"{node.node_id}: {issue}"
            out.print(text, style="yellow", markup=False, soft_wrap=True)
    for issue in response.issues:
        out.print(f"controller: {issue}", style="yellow", markup=False)


def _goodput(node: admin_pb2.NodeStatus) -> str:
    """Both ways, with its age once it is older than a few minutes; metered links are not asked."""
    if node.attributes.is_link_metered:
        return "metered"
    rates = [
        _number(8e-6 * getattr(node, name)) if node.HasField(name) else "-"
        for name in ("receive_bytes_per_second", "transmit_bytes_per_second")
    ]
    if rates == ["-", "-"]:
        return "-"
    age = node.goodput_age_seconds if node.HasField("goodput_age_seconds") else 0.0
    old = f" ({age / 60:.0f} min ago)" if age > _OLD_SECONDS else ""
    return "/".join(rates) + old


_OLD_SECONDS = 300.0


def print_models(nodes: Sequence[admin_pb2.NodeStatus]) -> None:
    """What nodes have, with the speeds that predictions use now."""
    table = Table()
    columns = (
        "node,model,phase,slots,context,reads t/s,writes t/s,all slots t/s,memory,pinned,issue"
    )
    for name in columns.split(","):
        table.add_column(name, overflow="fold")
    for node in nodes:
        for model in node.models:
            phase = fleet_pb2.ModelPhase.Name(model.phase).removeprefix("MODEL_PHASE_").lower()
            if model.HasField("progress_ratio"):
                phase += f" {100 * model.progress_ratio:.0f} %"
            table.add_row(
                node.node_id,
                model.name,
                phase if node.state != "offline" else f"{phase} (offline)",
                str(model.slots),
                str(model.context_tokens),
                *_speeds(model),
                f"{model.resident_bytes / 1e6:.0f} MB" if model.HasField("resident_bytes") else "-",
                "yes" if model.is_pinned else "",
                model.issue,
            )
    console().print(table if table.row_count else "No node has a model.")


def _speeds(model: fleet_pb2.ModelState) -> tuple[str, str, str]:
    if not model.HasField("calibration"):
        return ("-", "-", "-")
    speeds = model.calibration
    return (
        _number(speeds.prefill_tokens_per_second),
        _number(speeds.decode_tokens_per_second),
        _number(speeds.saturated_decode_tokens_per_second),
    )


def print_calibrations(responses: "Sequence[admin_pb2.CalibrateResponse]") -> None:
    """What was measured."""
    table = Table()
    columns = "node,model,reads t/s,writes t/s,all slots t/s,slots,power under load,power mode"
    for name in columns.split(","):
        table.add_column(name, overflow="fold")
    for response in responses:
        for model in response.models:
            speeds = model.calibration
            table.add_row(
                response.node_id,
                model.name,
                *_speeds(model),
                str(speeds.measured_slots or model.slots),
                f"{speeds.load_watts:.1f} W" if speeds.HasField("load_watts") else "-",
                speeds.power_mode or "-",
            )
    console().print(table if table.row_count else "Nothing was measured.")


class OrderProgress:
    """Tells on standard error how orders go: a bar for each node on a terminal, else lines."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal
        )
        self._bars: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> "OrderProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, node_id: str, update: fleet_pb2.OrderUpdate) -> None:
        """Take in one update of a node's order."""
        phase = fleet_pb2.OrderPhase.Name(update.phase).removeprefix("ORDER_PHASE_").lower()
        doing = update.message or phase
        if self._console.is_terminal:
            bar = self._bars.get(node_id)
            if bar is None:
                bar = self._bars[node_id] = self._progress.add_task("", total=None)
            is_known = update.HasField("progress_ratio") or phase != "running"
            self._progress.update(
                bar,
                description=f"{node_id}: {doing}",
                total=1.0 if is_known else None,
                completed=1.0 if phase != "running" else update.progress_ratio,
            )
        elif self._said.get(node_id) != doing:
            self._said[node_id] = doing
            self._console.print(f"{node_id}: {doing}")


def print_policy(response: admin_pb2.GetPolicyResponse) -> None:
    """What decides."""
    weights = response.weights
    console().print(
        f"{response.policy}, weights quality {weights.quality:g}, cost {weights.cost:g}, energy "
        f"{weights.energy:g}, time {weights.time:g}, {response.normalisation}; window "
        f"{response.window_seconds:g} s, at most {response.max_batch_requests} requests\n"
        f"available: {', '.join(response.available_policies)}"
    )
    if response.HasField("is_configured"):
        console().print(
            "from the settings"
            if response.is_configured
            else "set by `policy set`; a change of these settings overrides it"
        )
    for each in response.fallbacks:
        console().print(f"{each.policy} left {each.requests} requests to another: {each.cause}")
