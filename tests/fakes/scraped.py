"""What Prometheus understands of a scrape."""

from prometheus_client.parser import text_string_to_metric_families

from controller.telemetry.metrics import Metrics


def scraped(metrics: Metrics | str) -> dict[str, float]:
    """Every sample by its name without prefix and its labels in order of their names."""
    text = metrics if isinstance(metrics, str) else metrics.text().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{key}={sample.labels[key]}" for key in sorted(sample.labels))
            found[f"{sample.name.removeprefix('pointsman_')}{{{labels}}}"] = sample.value
    return found
