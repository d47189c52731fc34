"""Certificates that cannot be served with are told of in words; those that can are served with."""

import datetime
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from app.core.errors import AppError
from app.http.tls import check_certificate
from tests.api.asgi import serving


def issued(folder: Path, name: str = "own", **times: Any) -> tuple[str, str, str]:
    """Certificate, key and authority, as files."""
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", "127.0.0.1", **times)
    paths = [folder / f"{name}.{kind}.pem" for kind in ("cert", "key", "ca")]
    paths[0].write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    paths[1].chmod(0o600)
    cert, key, ca = map(str, paths)
    return cert, key, ca


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def good(folder: Path) -> tuple[str, str, str]:
    return issued(folder)


def days(count: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=count)


def test_a_good_one_is_silent(good: tuple[str, str, str]):
    assert check_certificate(good[0], good[1]) == []


def test_certificate_and_key_may_be_one_file(good: tuple[str, str, str], folder: Path):
    both = folder / "both.pem"
    both.write_text(Path(good[0]).read_text() + Path(good[1]).read_text())
    both.chmod(0o600)
    assert check_certificate(str(both), str(both)) == []


@pytest.mark.parametrize(("cert", "key", "named"), [("none", None, "cert"), (None, "none", "key")])
def test_a_file_that_is_not_there_is_named(
    good: tuple[str, str, str], cert: str | None, key: str | None, named: str
):
    with pytest.raises(AppError, match=f"--tls-{named}: none cannot be read: no such file"):
        check_certificate(cert or good[0], key or good[1])


def test_what_is_no_pem_is_named(good: tuple[str, str, str], folder: Path):
    other = folder / "other.der"
    other.write_bytes(b"\x30\x82\x00\x00")
    with pytest.raises(AppError, match=r"--tls-cert: .*other\.der is not a PEM file"):
        check_certificate(str(other), good[1])
    with pytest.raises(AppError, match=r"--tls-key: .*other\.der is not a PEM file"):
        check_certificate(good[0], str(other))


def test_what_is_pem_outside_only_is_refused(good: tuple[str, str, str], folder: Path):
    torn = folder / "torn.pem"
    torn.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(AppError, match="cannot be used"):
        check_certificate(str(torn), good[1])


def test_the_key_of_another_certificate_is_told(good: tuple[str, str, str], folder: Path):
    _, other, _ = issued(folder, "other")
    with pytest.raises(AppError, match=r"--tls-key: .* does not match the certificate in "):
        check_certificate(good[0], other)


def test_a_key_with_a_passphrase_is_not_asked_for_at_the_terminal(
    good: tuple[str, str, str], folder: Path
):
    from cryptography.hazmat.primitives import serialization as written

    key = written.load_pem_private_key(Path(good[1]).read_bytes(), None)
    locked = folder / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            written.Encoding.PEM,
            written.PrivateFormat.PKCS8,
            written.BestAvailableEncryption(b"word"),
        )
    )
    with pytest.raises(AppError, match="keys with a passphrase are not supported"):
        check_certificate(good[0], str(locked))


def test_one_that_is_over_or_not_yet_is_told_and_served_with(folder: Path):
    """A server that comes back at night must come back."""
    old = issued(folder, "old", not_before=days(-60), not_after=days(-1))
    [told] = check_certificate(old[0], old[1])
    assert "clients that verify certificates will reject" in told
    assert "expired" in told
    early = issued(folder, "early", not_before=days(2), not_after=days(60))
    [told] = check_certificate(early[0], early[1])
    assert "not yet valid" in told


def test_one_that_will_soon_be_over_is_told(folder: Path):
    end = days(5)
    soon = issued(folder, "soon", not_before=days(-60), not_after=end)
    [told] = check_certificate(soon[0], soon[1])
    assert f"expires on {end:%Y-%m-%d}" in told


def test_a_key_that_others_can_read_is_told(folder: Path):
    cert, key, _ = issued(folder, "readable")
    Path(key).chmod(0o644)
    [told] = check_certificate(cert, key)
    assert f"chmod 600 {key}" in told


def test_what_was_found_good_serves_clients_that_check(good: tuple[str, str, str]):
    cert, key, ca = good
    check_certificate(cert, key)

    async def hello(scope, receive, send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    with serving(hello, lifespan="off", ssl_certfile=cert, ssl_keyfile=key) as url:
        trusting = ssl.create_default_context(cafile=ca)
        reply = httpx.get(url.replace("http:", "https:"), verify=trusting)
        assert reply.text == "https"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url.replace("http:", "https:"), verify=ssl.create_default_context())
