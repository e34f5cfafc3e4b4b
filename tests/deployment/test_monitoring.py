"""The alerts, their runbook and the dashboard agree with each other and with the metrics.

`make test-prometheus` also runs all expressions in a Prometheus server.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from sightline.service.api_errors import ERRORS
from sightline.service.metrics import PREFIX, Metrics

RUNBOOK = "docs/how-to/runbook.md"
(GROUP,) = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
RULES: Sequence[dict[str, Any]] = GROUP["rules"]
RESOURCE = Path("deploy/kubernetes/components/monitoring/alerts.yaml")
DASHBOARD: dict[str, Any] = json.loads(Path("deploy/grafana/sightline.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NUM_COLUMNS = 24


def metrics_in(expr: str) -> list[tuple[str, str]]:
    """Return the metrics of an expression, in their order, each with its selectors."""
    return re.findall(rf"\b{PREFIX}(\w+)(?:\{{([^}}]*)\}})?", expr)


def family(metric: str) -> str:
    """Return the name of a metric without the suffix of a sample."""
    return re.sub(r"_(bucket|sum|count|total)$", "", metric)


def test_kubernetes_has_the_rules_of_prometheus() -> None:
    assert yaml.safe_load(RESOURCE.read_text(encoding="utf-8"))["spec"] == {"groups": [GROUP]}


def test_the_runbook_has_an_entry_for_each_alert() -> None:
    text = Path(RUNBOOK).read_text(encoding="utf-8")
    names, entries = zip(*re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE), strict=True)
    assert list(names) == [rule["alert"] for rule in RULES]
    for rule, entry in zip(RULES, entries, strict=True):
        severity, summary = rule["labels"]["severity"], rule["annotations"]["summary"]
        assert severity in ("critical", "warning") and summary
        assert rule["annotations"] == {"summary": summary, "runbook": f"{RUNBOOK}#{rule['alert'].lower()}"}
        time = "at once" if rule["for"] == "0m" else f"after {rule['for']}"
        head = f"\nSeverity {severity}, fires {time}:\n\n```text\n{rule['expr']}```\n\n**Meaning.** "
        assert entry.startswith(head), rule["alert"]
        parts = re.findall(r"^\*\*(.+?)\*\*", entry, flags=re.MULTILINE)
        assert parts == ["Meaning.", "Confirm.", "First steps.", "Silence"], rule["alert"]


def test_alerts_name_error_codes_that_exist() -> None:
    codes = re.findall(r'code="(\w+)"', "".join(rule["expr"] for rule in RULES))
    assert codes and set(codes) <= ERRORS.keys()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_panel_selects_by_the_variables_and_has_the_text_of_its_metric(panel: dict[str, Any]) -> None:
    metrics = Metrics("0")
    of_models = {*metrics.gauges, *metrics.counters, *metrics.histograms, "request_success"}
    named = [found for target in panel["targets"] for found in metrics_in(target["expr"])]
    assert named
    for name, selectors in named:
        variables = re.findall(r'(\w+)=~"\$(\w+)"', selectors)
        of_model = [("model_name", "model")] if family(name) in of_models else []
        assert variables == [("job", "job"), ("instance", "instance"), *of_model], name
    documentation = {metric.name: metric.documentation for metric in metrics.registry.collect()}
    assert panel["description"] == documentation[PREFIX + family(named[0][0])]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["fieldConfig"]["defaults"]["unit"] in ("bytes", "percentunit", "reqps", "s", "short")
    assert [target["refId"] for target in panel["targets"]] == list("ABC"[: len(panel["targets"])])


def test_panels_do_not_overlap() -> None:
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(cells)[0] < NUM_COLUMNS
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_variables_of_the_dashboard_are_those_of_its_queries() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    named = set(re.findall(r"\$\{?(\w+)", json.dumps([DASHBOARD["panels"], DASHBOARD["templating"]])))
    assert named - {"__rate_interval", "__all"} == variables


def test_prometheus_and_grafana_of_compose_are_started_again_and_keep_their_data() -> None:
    compose = yaml.safe_load(Path("docker-compose.yml").read_text(encoding="utf-8"))
    for name, folder in (("prometheus", "/prometheus"), ("grafana", "/var/lib/grafana")):
        service = compose["services"][name]
        assert service["restart"] == "unless-stopped"
        assert f"{name}-data:{folder}" in service["volumes"] and f"{name}-data" in compose["volumes"]
    # Without the variable, the folder of bundles names the default models.
    assert compose["services"]["service"]["environment"] == ["SIGHTLINE_DEFAULT_MODEL"]


def test_the_image_and_the_proxies_listen_on_ipv6_and_ipv4() -> None:
    dockerfile = Path("Dockerfile").read_text(encoding="utf-8")
    assert "SIGHTLINE_HOST=:: " in dockerfile and '["python", "-m", "sightline.service.health_check"]' in dockerfile
    nginx = Path("deploy/nginx/sightline.conf").read_text(encoding="utf-8")
    assert re.findall(r"listen (\S+) ssl;", nginx) == ["443", "[::]:443"]
    assert "bind :::443 v4v6 ssl" in Path("deploy/haproxy/haproxy.cfg").read_text(encoding="utf-8")
