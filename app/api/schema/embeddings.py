"""The request bodies of embeddings and rerankings.

Knows: every field that OpenAI, llama.cpp, Jina and Cohere document. Must not know: how the values
are used.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw

from app.api.schema.base import (
    NULL,
    Identifier,
    Model,
    Options,
    describe,
    ignore_fields,
    refer,
    reject_fields,
)
from app.api.schema.decode import BodyDecoder
from app.api.schema.generation import KeepAlive
from app.api.schema.unsupported_fields import list_unsupported_fields
from app.core.sampling_params import INT32_MAX

_Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]


class EmbeddingBody(Options, kw_only=True, frozen=True):
    """The body of POST /v1/embeddings."""

    unsupported: ClassVar = reject_fields(**list_unsupported_fields("embeddings"))

    input: Annotated[
        Raw,
        describe(
            "A string, a list of token IDs, or several of either. No input may be empty.",
            exact=refer("EmbeddingInput")[0],
        ),
    ]
    model: Model = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        describe(
            "`base64` encodes the embedding as consecutive little-endian float32 values.",
            expected='"float" or "base64"',
            schema={"default": "float"},
        ),
    ] = None
    dimensions: Annotated[
        _Count | None,
        describe(
            "Truncate each embedding to this many dimensions and normalize it again, for models "
            "trained for shortened embeddings. Cannot exceed the model's embedding size."
        ),
    ] = None
    pooling: Annotated[
        Literal["mean", "last"] | None,
        describe(
            "`mean` averages the hidden states of all tokens, and `last` uses the hidden state of "
            "the last token. The default depends on the model. This field is an extension.",
            expected='"mean" or "last"',
        ),
    ] = None
    keep_alive: KeepAlive = None
    ttl: KeepAlive = None
    user: Identifier = None


class NativeEmbeddingBody(EmbeddingBody, kw_only=True, frozen=True):
    """The body of llama.cpp's POST /embedding, which may name the input `content`."""

    input: Annotated[
        Raw, describe("OpenAI's name for `content`.", exact=refer("EmbeddingInput")[0])
    ] = NULL
    content: Annotated[
        Raw, describe("The input, unless `input` is set.", exact=refer("EmbeddingInput")[0])
    ] = NULL


class Document(msgspec.Struct, frozen=True):
    """A document with other fields, which have no effect."""

    text: str


_Documents = (
    list[Annotated[str | Document, describe(expected="a string or an object with a text")]] | None
)


class RerankBody(Options, kw_only=True, frozen=True):
    """The body of POST /v1/rerank."""

    # Cohere's; the model's context applies
    ignored = ignore_fields("max_tokens_per_doc")

    query: Annotated[
        str,
        describe("The text that the documents are compared with.", schema={"minLength": 1}),
    ]
    documents: Annotated[
        _Documents, describe("Texts, or objects with a `text`.", exact=refer("RerankDocuments")[0])
    ] = None
    texts: Annotated[
        _Documents, describe("llama.cpp's name for `documents`.", exact=refer("RerankDocuments")[0])
    ] = None
    model: Model = None
    top_n: Annotated[
        _Count | None,
        describe("The number of documents to return, those with the highest scores."),
    ] = None
    return_documents: Annotated[
        bool | None, describe("Whether the response contains the texts.")
    ] = None
    keep_alive: KeepAlive = None
    ttl: KeepAlive = None


EMBEDDING = BodyDecoder(EmbeddingBody)
NATIVE_EMBEDDING = BodyDecoder[EmbeddingBody](NativeEmbeddingBody)
RERANK = BodyDecoder(RerankBody)
