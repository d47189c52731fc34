"""What dashboard and alerts ask for is what a server tells that has answered: names, labels and
the values of labels."""

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

# what Prometheus adds to all that it reads
ADDED = {"instance", "job"}

# what would be there if something happened that a test does not wait for
POSSIBLE: Mapping[str, set[str]] = {"finished_reason": set(FINISHED_REASONS)}

Labels = Mapping[str, set[str]]


@pytest.fixture(scope="module")
def told(tiny_model: Path) -> Mapping[str, Labels]:
    """Samples of a server that has answered: by name, the values of each label."""
    body: Any = {"model": "tiny", "max_tokens": 4}
    chat = {**body, "messages": [{"role": "user", "content": "hi"}]}
    with run_server(str(tiny_model)) as server, httpx.Client(timeout=TIMEOUT) as client:
        assert client.post(f"{server.url}/v1/chat/completions", json=chat).is_success
        found = client.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "hi"})
        assert found.is_success
        text = client.get(f"{server.url}/metrics").text
    samples: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    samples["up"]["job"].add("mlxrunner")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                samples[sample.name][label].add(value)
            samples[sample.name]["job"].add("mlxrunner")
    return {name: dict(labels) for name, labels in samples.items()}


def parsed(expression: str) -> promql.Expr:
    """With Grafana's variables as it would put them in."""
    filled = expression.replace("$__rate_interval", "1m")
    return promql.parse(re.sub(r'"\$\w+"', '".*"', filled))


def parts(node: Any) -> Iterator[Any]:
    """An expression and all that it is made of."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "args"):
        inner = getattr(node, name, None)
        for one in inner if isinstance(inner, list) else [inner]:
            if one is not None:
                yield from parts(one)


def labels_of(node: Any, told: Mapping[str, Labels]) -> set[str]:
    """Those of an expression's results."""
    match node:
        case promql.VectorSelector():
            return {*told[node.name or ""], *ADDED}
        case promql.AggregateExpr():
            return set() if node.modifier is None else set(node.modifier.labels)
        case promql.BinaryExpr():
            return labels_of(node.lhs, told)
        case promql.Call():
            return labels_of(node.args[-1], told) - {"le"}
        case promql.MatrixSelector():
            return labels_of(node.vector_selector, told)
        case promql.ParenExpr():
            return labels_of(node.expr, told)
        case _:
            raise AssertionError(f"a kind of expression that this does not know: {node}")


@pytest.mark.parametrize(("where", "query"), QUERIES)
def test_each_query_asks_for_what_there_is(
    told: Mapping[str, Labels], where: str, query: str
) -> None:
    found = 0
    for node in parts(parsed(query)):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            inner = labels_of(node.expr, told) | {"le"}
            assert set(node.modifier.labels) <= inner
        if not isinstance(node, promql.VectorSelector):
            continue
        found += 1
        assert node.name is not None
        assert node.name in told
        for matcher in node.matchers.matchers:
            if matcher.name in ADDED - told[node.name].keys():
                continue
            values = told[node.name][matcher.name] | POSSIBLE.get(matcher.name, set())
            wanted = matcher.value.split("|") if "|" in matcher.value else [matcher.value]
            for value in wanted:
                assert any(re.fullmatch(value, known) for known in values), (matcher.name, value)
    assert found


def test_a_query_for_what_is_not_there_is_caught(told: Mapping[str, Labels]) -> None:
    for query in (
        "rate(vllm:nothing_total[5m])",
        'mlxrunner_state{state="bored"}',
        "sum by (colour) (mlxrunner_state)",
    ):
        with pytest.raises((AssertionError, KeyError)):
            test_each_query_asks_for_what_there_is(told, "planted", query)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_each_alert_says_what_is_wrong_with_whom(told: Mapping[str, Labels], rule: Any) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "description"}
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert named <= labels_of(parsed(rule["expr"]), told)
    assert "instance" in named


def test_panels_have_names_of_their_own_and_lie_beside_each_other() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells


def test_every_panel_says_what_it_shows() -> None:
    for panel in PANELS:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            variables = set(re.findall(r"\$(\w+)", target["expr"] + target["legendFormat"]))
            known = {one["name"] for one in DASHBOARD["templating"]["list"]}
            assert variables <= {*known, "__rate_interval"}


def test_prometheus_asks_under_the_name_that_the_alerts_know() -> None:
    [job] = PROMETHEUS["scrape_configs"]
    assert job["job_name"] == "mlxrunner"
    assert job["authorization"].keys() == {"credentials_file"}
