"""Keys: how they are written, how they are found, and that nobody is ever shown one again."""

import hmac
import itertools
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError
from app.http import api_keys
from app.http.api_keys import (
    ApiKey,
    find_key,
    format_entry,
    hash_key,
    load_env_keys,
    parse_key_file,
)

LAPTOP, PHONE, BOSS = (api_keys.generate_key() for _ in range(3))


def entry(name: str, key: str, more: str = "") -> str:
    return f'[[keys]]\nname = "{name}"\nsha256 = "{hash_key(key).hex()}"\n{more}\n'


def test_fresh_keys_differ_and_can_be_sent():
    made = {api_keys.generate_key() for _ in range(100)}
    assert len(made) == 100
    for key in made:
        assert key.startswith("mr-")
        assert len(key) == 3 + 43  # 256 bits
        assert set(key) <= set(string.ascii_letters + string.digits + "-_")


def test_a_key_is_found_by_what_it_is():
    known = [
        ApiKey(name="laptop", digest=hash_key(LAPTOP)),
        ApiKey(name="phone", digest=hash_key(PHONE)),
    ]
    assert find_key(known, LAPTOP) is known[0]
    assert find_key(known, PHONE) is known[1]
    for wrong in (
        "",
        LAPTOP[:-1],
        LAPTOP + "x",
        LAPTOP.upper(),
        hash_key(LAPTOP).hex(),
        "é",
        "\udc80",
    ):
        assert find_key(known, wrong) is None
    assert find_key([], LAPTOP) is None


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch):
    """How long it takes must not tell where in the list a key stands, nor that it stands there."""
    known = [ApiKey(name=f"k{n}", digest=hash_key(f"key number {n}")) for n in range(20)]
    compared: list[Any] = []
    real = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    for shown in ("key number 0", "key number 19", "none of them"):
        compared.clear()
        find_key(known, shown)
        assert [a for a, _ in compared] == [key.digest for key in known]


@given(st.text(), st.text())
def test_a_key_matches_itself_and_nothing_else(key: str, other: str):
    known = [ApiKey(name="one", digest=hash_key(key))]
    assert find_key(known, key) is known[0]
    assert (find_key(known, other) is None) == (key != other)


def test_a_file_names_keys_and_their_scopes():
    text = entry("laptop", LAPTOP, 'comment = "blue"') + entry("boss", BOSS, "admin = true")
    assert parse_key_file(text) == (
        ApiKey(name="laptop", digest=hash_key(LAPTOP)),
        ApiKey(name="boss", digest=hash_key(BOSS), admin=True),
    )


@pytest.mark.parametrize("admin", [True, False])
def test_what_is_written_is_read_again(admin: bool):
    key = ApiKey(name="a.b_c-d@e", digest=hash_key(LAPTOP), admin=admin)
    assert parse_key_file(format_entry(key, "made 2026-11-21")) == (key,)
    assert LAPTOP not in format_entry(key, "")


def test_one_name_may_have_two_keys_while_one_takes_over_from_the_other():
    assert len(parse_key_file(entry("laptop", LAPTOP) + entry("laptop", PHONE))) == 2


SECRET = "mr-do-not-show-me-to-anybody"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "contains no keys"),
        ("keys = []", "contains no keys"),
        ("keys = 5", "contains no keys"),
        ("keys = [5]", r"key 1 is not a \[\[keys\]\] table"),
        (f"{SECRET}", "not valid TOML"),
        (f'[[keys]]\nname = "a"\nsha256 = "{SECRET}', "not valid TOML"),
        (f'[[keys]]\nname = "a"\nsha256 = "{SECRET}"', "64 hexadecimal digits"),
        (f'[[keys]]\nname = "{SECRET} {SECRET}"', "key 1: name must be at most"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"', "unknown field 'key'"),
        (entry("a", LAPTOP) + '[[keys]]\nname = "b"', "key 2: sha256"),
        (entry("", LAPTOP), "key 1: name"),
        (entry("a\\nb", LAPTOP), "key 1: name"),
        (entry("a" * 65, LAPTOP), "key 1: name"),
        (entry("a", LAPTOP, 'admin = "yes"'), "admin must be true or false"),
        (entry("a", LAPTOP, "comment = 5"), "comment a string"),
        (f'key = "{SECRET}"\n' + entry("a", LAPTOP), r"something other than \[\[keys\]\] tables"),
        (entry("a", LAPTOP) + entry("b", LAPTOP), "a and b have the same key"),
    ],
    # numbers: keys are fresh in each process, and workers must agree on the names of tests
    ids=itertools.count(),
)
def test_a_file_that_is_wrong_is_told_of_without_its_content(text: str, why: str):
    with pytest.raises(AppError, match=why) as caught:
        parse_key_file(text)
    assert SECRET not in caught.value.message
    assert hash_key(LAPTOP).hex() not in caught.value.message


def test_the_environment_gives_one_key_that_may_everything_and_others_that_may_not():
    variables = {
        "MLXRUNNER_API_KEY": f" {BOSS}\n",
        "MLXRUNNER_API_KEYS": f"laptop={LAPTOP}, phone={PHONE},",
        "PATH": "/bin",
    }
    assert load_env_keys(variables) == (
        ApiKey(name="owner", digest=hash_key(BOSS), admin=True),
        ApiKey(name="laptop", digest=hash_key(LAPTOP)),
        ApiKey(name="phone", digest=hash_key(PHONE)),
    )
    assert variables == {"PATH": "/bin"}, "what we start must not inherit them"
    assert load_env_keys({}) == load_env_keys({"MLXRUNNER_API_KEY": ""}) == ()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MLXRUNNER_API_KEY", "secret", "MLXRUNNER_API_KEY: the key must be at least 16"),
        ("MLXRUNNER_API_KEY", "with spaces in the middle", "MLXRUNNER_API_KEY: the key must be"),
        ("MLXRUNNER_API_KEYS", SECRET, "entry 1 is not of the form name=key"),
        ("MLXRUNNER_API_KEYS", f"a={SECRET},b=short", "entry 2: the key must be at least 16"),
        ("MLXRUNNER_API_KEYS", f"={SECRET}", "entry 1: the name"),
        ("MLXRUNNER_API_KEYS", f"{SECRET} {SECRET}=x", "entry 1: the name"),
        ("MLXRUNNER_API_KEYS", f"a={SECRET},b={SECRET}", "a and b have the same key"),
    ],
)
def test_a_variable_that_is_wrong_is_told_of_without_its_content(name: str, value: str, why: str):
    with pytest.raises(AppError, match=why) as caught:
        load_env_keys({name: value})
    assert SECRET not in caught.value.message
