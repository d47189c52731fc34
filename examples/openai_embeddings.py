"""OpenAI's Python library: embeddings of texts.

OPENAI_BASE_URL=http://localhost:8080/v1 python examples/openai_embeddings.py
"""

import math
import os

from openai import OpenAI

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server

TEXTS = ["The cat sleeps.", "The cat is asleep.", "17 + 25 = 42"]


def main() -> None:
    client = OpenAI()
    model = client.models.list().data[0].id

    # By default, the library requests base64 and decodes it.
    answer = client.embeddings.create(model=model, input=TEXTS)
    vectors = [entry.embedding for entry in answer.data]
    print(
        f"{len(vectors)} vectors of {len(vectors[0])} numbers, {answer.usage.total_tokens} tokens"
    )
    for text, vector in zip(TEXTS[1:], vectors[1:], strict=True):
        print(f"{cosine(vectors[0], vector):.3f}  {TEXTS[0]} · {text}")
    for vector in vectors:
        assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-3)

    # The same embedding as a list of numbers. It does not depend on the other inputs.
    alone = client.embeddings.create(model=model, input=TEXTS[0], encoding_format="float")
    assert cosine(alone.data[0].embedding, vectors[0]) > 0.9999

    # Fewer dimensions, normalized again to length 1.
    short = client.embeddings.create(model=model, input=TEXTS[0], dimensions=16).data[0].embedding
    assert len(short) == 16
    assert math.isclose(math.hypot(*short), 1, abs_tol=1e-3)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


if __name__ == "__main__":
    main()
