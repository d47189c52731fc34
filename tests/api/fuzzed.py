"""openapi.yaml, prepared for a fuzzer."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import hypothesis
import pytest
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.generation.feedback import NO_FEEDBACK
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.api.schema.unsupported_fields import Endpoint, list_unsupported_fields
from tests.openapi_document import read_openapi


def is_no_server_error(context: Any, response: Any, case: Any) -> bool | None:
    """schemathesis' own check, except for 501 where openapi.yaml documents it."""
    if response.status_code == 501 and "501" in case.operation.definition.raw["responses"]:
        return None
    return not_a_server_error(context, response, case)


# checks that pass with any model
CHECKS = (
    is_no_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
)

# Rules about several fields at once, which a schema could only express by listing every
# combination; openapi.yaml describes them in words. Identified by a part of the error message.
BETWEEN_FIELDS = (
    "are mutually exclusive",
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
    # /v1/responses: stored responses, and settings of the server
    "was not found",
    "must contain at least one item for the model",
    "truncation cannot be",
    # of Anthropic's messages
    "must contain at least one message with content",
    "must be followed by a user message with their tool_result blocks",
    "requires a tool that the client can run",
    "tool_choice.name is missing",
    "is a tool that Anthropic's servers run",
    "keep one of them",
    # an attachment in a question
    "this model reads text only",
    "the image is missing",
    "is not a data URL",
    "send PNG, JPEG, WebP or GIF",
    "the image is not valid base64",
    "uses the URL-safe alphabet",
    "is not supported: send the image itself",
    "is not supported: send its text",
    "did you mean",  # an unknown field that resembles a known one
    # of Ollama's API
    "raw mode does not support",
    "'from' or 'files' was specified",
)


# fields of one endpoint here, and of another endpoint on other servers
ENDPOINT_FIELDS = {"echo", "best_of"}


def accepts_valid_requests(context: Any, response: Any, case: Any) -> bool | None:
    """schemathesis' own check, except for requests that break one of these rules."""
    if response.status_code == 400:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        if any(rule in message for rule in BETWEEN_FIELDS):
            return None
    return positive_data_acceptance(context, response, case)


# whether valid requests are accepted depends on the model as well, for example on its context
ACCEPTING_CHECKS = (*CHECKS, accepts_valid_requests)


def each_operation(schema: Any) -> pytest.MarkDecorator:
    """Parametrizes a test with the operations of the document."""
    operations = [result.ok() for result in schema.get_all_operations()]
    return pytest.mark.parametrize(
        "operation", [pytest.param(operation, id=operation.label) for operation in operations]
    )


def send_cases(schema: Any, operation: Any, send: Callable[[Any], None], count: int) -> None:
    """Calls `send` with the cases of an operation: each field with its examples, absent, and
    invalid in several ways, and `count` random requests. They are the same on every run.

    schemathesis' own decorator builds the cases of all operations when pytest collects tests, in
    every worker, which takes longer than most of these tests."""

    @hypothesis.settings(
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
    def send_case(case: Any) -> None:
        send(case)

    load_all_checks()
    build_operation_test(
        config=schema.config,
        operation=operation,
        test_func=send_case,
        given_kwargs={},
        feedback=NO_FEEDBACK,
    )()


def document(model: str, vocab: int) -> Any:
    """openapi.yaml with facts that a schema cannot express or does not contain: the served model,
    the size of its vocabulary, and which strings are JSON."""
    spec = deepcopy(read_openapi())
    schemas = spec["components"]["schemas"]
    schemas["ModelId"]["enum"] = [model]
    schemas["TokenId"]["maximum"] = vocab - 1
    schemas["ToolCall"]["properties"]["function"]["properties"]["arguments"]["enum"] = ["", "{}"]
    schemas["FunctionCallItem"]["properties"]["arguments"]["enum"] = ["", "{}"]
    schemas["GuidedJson"]["anyOf"][1]["enum"] = ["{}"]
    schemas["StructuredOutputs"]["properties"]["json"]["anyOf"][1]["enum"] = ["{}"]
    # so that tool choices name existing tools, and not every request has conflicting formats
    schemas["FunctionName"]["enum"] = ["f", "math.add"]
    chat, completion = (schemas[f"{kind}Request"] for kind in ("ChatCompletion", "Completion"))
    for name in ("guided_json", "guided_regex", "guided_grammar", "response_format"):
        del completion["properties"][name]
    for name in ("guided_choice", "guided_grammar", "structured_outputs"):
        del chat["properties"][name]
    for name in ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"):
        del chat["properties"][name]
    completion["properties"]["max_tokens"]["minimum"] = 1  # 0 needs echo
    # tests/api/schema/test_unsupported_fields.py tests each of these; otherwise, they would make up
    # most of every request
    endpoints: tuple[Endpoint, ...] = ("chat", "completions", "responses", "embeddings")
    others = {name for endpoint in endpoints for name in list_unsupported_fields(endpoint)}
    others |= {"n_predict", "n_keep", "grammar", "json_schema", "return_progress"}
    for kind in ("ChatCompletion", "Completion", "Response", "Embedding"):
        properties = schemas[f"{kind}Request"]["properties"]
        for name in others - {"skip_special_tokens", "mirostat"} - ENDPOINT_FIELDS:
            properties.pop(name, None)
    return spec
