"""Keys: their format, their lookup, and that messages never contain one."""

import hmac
import itertools
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError
from app.core.usage import UsageLimits
from app.http import api_keys
from app.http.api_keys import (
    ApiKey,
    Keyring,
    find_key,
    format_entry,
    hash_key,
    load_env_keys,
    parse_key_file,
)
from tests.rows import rows

LAPTOP, PHONE, BOSS = (api_keys.generate_key() for _ in range(3))


def entry(name: str, key: str, more: str = "") -> str:
    return f'[[keys]]\nname = "{name}"\nsha256 = "{hash_key(key).hex()}"\n{more}\n'


def test_generated_keys_are_unique_and_valid_in_headers():
    keys = {api_keys.generate_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert key.startswith("mr-")
        assert len(key) == 3 + 43  # 256 bits
        assert set(key) <= set(string.ascii_letters + string.digits + "-_")


def test_a_key_is_found_by_its_exact_text():
    keys = [
        ApiKey(name="laptop", digest=hash_key(LAPTOP)),
        ApiKey(name="phone", digest=hash_key(PHONE)),
    ]
    assert find_key(keys, LAPTOP) is keys[0]
    assert find_key(keys, PHONE) is keys[1]
    for wrong in (
        "",
        LAPTOP[:-1],
        LAPTOP + "x",
        LAPTOP.upper(),
        hash_key(LAPTOP).hex(),
        "é",
        "\udc80",
    ):
        assert find_key(keys, wrong) is None
    assert find_key([], LAPTOP) is None


def test_every_key_is_compared_at_every_lookup(monkeypatch: pytest.MonkeyPatch):
    """The duration must not reveal the position of a key in the list, nor that it is in the
    list."""
    keys = [ApiKey(name=f"k{n}", digest=hash_key(f"key number {n}")) for n in range(20)]
    compared: list[Any] = []
    real = hmac.compare_digest

    def recording_compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", recording_compare)
    for candidate in ("key number 0", "key number 19", "none of them"):
        compared.clear()
        find_key(keys, candidate)
        assert [a for a, _ in compared] == [key.digest for key in keys]


@given(st.text(), st.text())
def test_a_key_matches_only_itself(key: str, other: str):
    keys = [ApiKey(name="one", digest=hash_key(key))]
    assert find_key(keys, key) is keys[0]
    assert (find_key(keys, other) is None) == (key != other)


def test_a_file_has_keys_with_names_and_scopes():
    text = entry("laptop", LAPTOP, 'comment = "blue"') + entry("boss", BOSS, "admin = true")
    assert parse_key_file(text) == (
        ApiKey(name="laptop", digest=hash_key(LAPTOP)),
        ApiKey(name="boss", digest=hash_key(BOSS), admin=True),
    )


@pytest.mark.parametrize("admin", [True, False])
def test_a_formatted_entry_is_parsed_back(admin: bool):
    key = ApiKey(name="a.b_c-d@e", digest=hash_key(LAPTOP), admin=admin)
    assert parse_key_file(format_entry(key, "made 2026-11-21")) == (key,)
    assert LAPTOP not in format_entry(key, "")


@rows(
    ("written", "expires"),
    [
        ("2027-01-31", 1_801_353_600),
        ("2027-01-31T18:00:00Z", 1_801_418_400),
        ("2027-01-31T18:00:00", 1_801_418_400),
        ("2027-01-31T18:00:00+02:00", 1_801_411_200),
    ],
)
def test_a_key_may_expire(written: str, expires: float):
    [key] = parse_key_file(entry("laptop", LAPTOP, f"expires = {written}"))
    assert key.expires == expires


def test_a_key_may_have_limits_and_its_name_gets_the_lowest_ones():
    text = (
        entry("laptop", LAPTOP, "daily_tokens = 9\nrequests_per_minute = 1")
        + entry("laptop", PHONE, "daily_tokens = 5")
        + entry("boss", BOSS)
    )
    keys = parse_key_file(text)
    assert keys[0].limits == UsageLimits(daily_tokens=9, requests_per_minute=1)
    keyring = Keyring(keys)
    assert keyring.get_limits("laptop") == UsageLimits(daily_tokens=5, requests_per_minute=1)
    assert keyring.get_limits("boss") == keyring.get_limits("unknown") == UsageLimits()


def test_one_name_may_have_two_keys_for_rotation():
    assert len(parse_key_file(entry("laptop", LAPTOP) + entry("laptop", PHONE))) == 2


SECRET = "mr-do-not-show-me-to-anybody"


@rows(
    ("text", "reason"),
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
        (entry("a", LAPTOP, f'expires = "{SECRET}"'), "key 1: expires must be a date"),
        (entry("a", LAPTOP, "expires = 18:00:00"), "key 1: expires must be a date"),
        (entry("a", LAPTOP, f'daily_tokens = "{SECRET}"'), "key 1: daily_tokens must be an"),
        (entry("a", LAPTOP, "daily_tokens = true"), "key 1: daily_tokens must be an integer"),
        (entry("a", LAPTOP, "requests_per_minute = 0"), "integer of at least 1"),
        (f'key = "{SECRET}"\n' + entry("a", LAPTOP), r"something other than \[\[keys\]\] tables"),
        (entry("a", LAPTOP) + entry("b", LAPTOP), "a and b have the same key"),
    ],
    # numbers: each process generates other keys, and pytest workers must agree on test ids
    ids=itertools.count(),
)
def test_errors_of_an_invalid_file_do_not_quote_it(text: str, reason: str):
    with pytest.raises(AppError, match=reason) as caught:
        parse_key_file(text)
    assert SECRET not in caught.value.message
    assert hash_key(LAPTOP).hex() not in caught.value.message


def test_the_environment_has_one_admin_key_and_ordinary_keys():
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
    assert variables == {"PATH": "/bin"}, "child processes must not inherit them"
    assert load_env_keys({}) == load_env_keys({"MLXRUNNER_API_KEY": ""}) == ()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
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
def test_errors_of_an_invalid_variable_do_not_quote_it(name: str, value: str, reason: str):
    with pytest.raises(AppError, match=reason) as caught:
        load_env_keys({name: value})
    assert SECRET not in caught.value.message
