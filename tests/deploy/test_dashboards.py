"""Dashboard and alerts use only metrics, labels and label values that a server exports."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.api.metrics.request_metrics import FINISHED_REASONS
from tests.rows import rows
from tests.server_process import ROOT, TIMEOUT, run_server

DEPLOY = ROOT / "deploy"
DASHBOARD: Any = json.loads((DEPLOY / "grafana" / "mlxrunner.json").read_text("utf-8"))
PROMETHEUS: Any = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
[RULES] = [
    group["rules"]
    for file in PROMETHEUS["rule_files"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / file).read_text("utf-8"))["groups"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    *(
        (f"panel: {panel['title']}", query["expr"])
        for panel in PANELS
        for query in panel["targets"]
    ),
    *((f"alert: {rule['alert']}", rule["expr"]) for rule in RULES),
]

# labels that Prometheus adds
SCRAPE_LABELS = {"instance", "job"}

# label values of events that do not occur in these tests
POSSIBLE_VALUES: Mapping[str, set[str]] = {"finished_reason": set(FINISHED_REASONS)}

Labels = Mapping[str, set[str]]


@pytest.fixture(scope="module")
def metrics(tiny_model: Path) -> Mapping[str, Labels]:
    """The samples of a server after some requests: by name, the values of each label."""
    body: Any = {"model": "tiny", "max_tokens": 4}
    chat = {**body, "messages": [{"role": "user", "content": "hi"}]}
    with run_server(str(tiny_model)) as server, httpx.Client(timeout=TIMEOUT) as client:
        assert client.post(f"{server.url}/v1/chat/completions", json=chat).is_success
        reply = client.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "hi"})
        assert reply.is_success
        text = client.get(f"{server.url}/metrics").text
    samples: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    samples["up"]["job"].add("mlxrunner")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                samples[sample.name][label].add(value)
            samples[sample.name]["job"].add("mlxrunner")
    return {name: dict(labels) for name, labels in samples.items()}


def parse_query(expression: str) -> promql.Expr:
    """Parse the expression, with Grafana's variables replaced."""
    replaced = expression.replace("$__rate_interval", "1m")
    return promql.parse(re.sub(r'"\$\w+"', '".*"', replaced))


def iter_parts(node: Any) -> Iterator[Any]:
    """An expression and all its parts."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "args"):
        inner = getattr(node, name, None)
        for one in inner if isinstance(inner, list) else [inner]:
            if one is not None:
                yield from iter_parts(one)


def get_result_labels(node: Any, metrics: Mapping[str, Labels]) -> set[str]:
    """The labels of an expression's results."""
    match node:
        case promql.VectorSelector():
            return {*metrics[node.name or ""], *SCRAPE_LABELS}
        case promql.AggregateExpr():
            return set() if node.modifier is None else set(node.modifier.labels)
        case promql.BinaryExpr():
            return get_result_labels(node.lhs, metrics)
        case promql.Call():
            return get_result_labels(node.args[-1], metrics) - {"le"}
        case promql.MatrixSelector():
            return get_result_labels(node.vector_selector, metrics)
        case promql.ParenExpr():
            return get_result_labels(node.expr, metrics)
        case _:
            raise AssertionError(f"unknown kind of expression: {node}")


def check_query(metrics: Mapping[str, Labels], query: str) -> None:
    """Raises AssertionError or KeyError for a metric or label that does not exist."""
    num_selectors = 0
    for node in iter_parts(parse_query(query)):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            inner = get_result_labels(node.expr, metrics) | {"le"}
            assert set(node.modifier.labels) <= inner
        if not isinstance(node, promql.VectorSelector):
            continue
        num_selectors += 1
        assert node.name is not None
        assert node.name in metrics
        for matcher in node.matchers.matchers:
            if matcher.name in SCRAPE_LABELS - metrics[node.name].keys():
                continue
            values = metrics[node.name][matcher.name] | POSSIBLE_VALUES.get(matcher.name, set())
            patterns = matcher.value.split("|") if "|" in matcher.value else [matcher.value]
            for value in patterns:
                assert any(re.fullmatch(value, known) for known in values), (matcher.name, value)
    assert num_selectors


@rows(("where", "query"), QUERIES)
def test_each_query_uses_existing_metrics(
    metrics: Mapping[str, Labels], where: str, query: str
) -> None:
    check_query(metrics, query)


def test_a_query_of_an_unknown_metric_is_detected(metrics: Mapping[str, Labels]) -> None:
    for query in (
        "rate(vllm:nothing_total[5m])",
        'mlxrunner_state{state="bored"}',
        "sum by (colour) (mlxrunner_state)",
    ):
        with pytest.raises((AssertionError, KeyError)):
            check_query(metrics, query)


@rows("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_each_alert_has_a_summary_and_uses_existing_labels(
    metrics: Mapping[str, Labels], rule: Any
) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    used_labels = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert used_labels <= get_result_labels(parse_query(rule["expr"]), metrics)
    assert "instance" in used_labels


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    used: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & used
        used |= cells


def test_every_panel_has_a_description() -> None:
    for panel in PANELS:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            variables = set(re.findall(r"\$(\w+)", target["expr"] + target["legendFormat"]))
            known = {one["name"] for one in DASHBOARD["templating"]["list"]}
            assert variables <= {*known, "__rate_interval"}


def test_the_job_name_is_that_of_the_alerts() -> None:
    [job] = PROMETHEUS["scrape_configs"]
    assert job["job_name"] == "mlxrunner"
    assert job["authorization"].keys() == {"credentials_file"}
