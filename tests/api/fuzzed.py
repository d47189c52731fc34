"""openapi.yaml as a fuzzer needs it."""

from pathlib import Path
from typing import Any

import hypothesis
import yaml
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

# what holds for any model
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
)

# Rules about several fields at once, which a schema could only tell by naming every combination;
# the documents tell them in words. By what the refusal says.
BETWEEN_FIELDS = (
    "exclude each other",
    "are aliases",
    "duplicates the field",
    "is only allowed with tools",
    "must be the name of one of the tools",
    "two tools have the name",
    "cannot be combined with",
    "but max_tokens is",  # min_tokens beyond max_tokens
    "must be at least n",
    "cannot be streamed",
    "choices; a request may have at most",
    "structured_outputs must contain one of",  # and not only nulls
    "the body must contain exactly one of",
    # calls and their results
    "must be a response to a preceding message",
    "not found in 'tool_calls' of previous message",
    "must be followed by tool messages",
    # of responses: what is kept here, and what a server with other settings would do
    "was not found",
    "must contain at least one item for the model",
    "truncation cannot be",
)


# of one endpoint, and of another server's other endpoint
OWN = {"echo", "best_of"}


def accepts_valid_requests(context: Any, response: Any, case: Any) -> bool | None:
    """schemathesis' own check, but for requests that break one of those rules."""
    if response.status_code == 400:
        message = response.json()["error"]["message"]
        if any(rule in message for rule in BETWEEN_FIELDS):
            return None
    return positive_data_acceptance(context, response, case)


# whether valid requests are accepted too depends on the model: on its context, for one
ACCEPTING_CHECKS = (*CHECKS, accepts_valid_requests)


def examples(count: int) -> hypothesis.settings:
    """The same requests on every run, as many as that for each operation."""
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.filter_too_much,
            hypothesis.HealthCheck.data_too_large,
        ],
    )


def document(model: str, vocab: int) -> Any:
    """As it stands in the repository, but for what a schema cannot say or cannot know: which model
    is served, how large its vocabulary is, and that a text is JSON."""
    text = (Path(__file__).parents[2] / "openapi.yaml").read_text("utf-8")
    read = yaml.safe_load(text)
    schemas = read["components"]["schemas"]
    schemas["ModelId"]["enum"] = [model]
    schemas["TokenIds"]["items"]["maximum"] = vocab - 1
    schemas["ToolCall"]["properties"]["function"]["properties"]["arguments"]["enum"] = ["", "{}"]
    schemas["FunctionCallItem"]["properties"]["arguments"]["enum"] = ["", "{}"]
    schemas["GuidedJson"]["anyOf"][1]["enum"] = ["{}"]
    schemas["StructuredOutputs"]["properties"]["json"]["anyOf"][1]["enum"] = ["{}"]
    # so that choices meet tools, and formats do not always meet each other
    schemas["FunctionName"]["enum"] = ["f", "math.add"]
    chat, completion = (schemas[f"{kind}Request"] for kind in ("ChatCompletion", "Completion"))
    for name in ("guided_json", "guided_regex", "guided_grammar", "response_format"):
        del completion["properties"][name]
    for name in ("guided_choice", "guided_grammar", "structured_outputs"):
        del chat["properties"][name]
    for name in ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"):
        del chat["properties"][name]
    completion["properties"]["max_tokens"]["minimum"] = 1  # 0 is for those who echo
    # tests/api/openai/test_compat_fields.py tries each of these; here they would be most of every
    # request
    others = {name for group in read["x-fields-of-other-servers"].values() for name in group}
    for kind in ("ChatCompletion", "Completion", "Response", "Embedding"):
        properties = schemas[f"{kind}Request"]["properties"]
        for name in others - {"priority", "skip_special_tokens", "mirostat_tau"} - OWN:
            properties.pop(name, None)
    return read
