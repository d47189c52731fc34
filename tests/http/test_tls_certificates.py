"""Invalid certificates give clear errors; valid ones are used."""

import datetime
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from app.core.errors import AppError
from app.http.tls import check_certificate
from tests.api.asgi import serve_app
from tests.server_process import TIMEOUT


def issue_certificate(folder: Path, name: str = "own", **times: Any) -> tuple[str, str, str]:
    """Files of a new certificate, its key and its authority."""
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
def valid(folder: Path) -> tuple[str, str, str]:
    return issue_certificate(folder)


def in_days(count: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=count)


def test_a_valid_certificate_gives_no_warning(valid: tuple[str, str, str]):
    assert check_certificate(valid[0], valid[1]) == []


def test_certificate_and_key_may_be_one_file(valid: tuple[str, str, str], folder: Path):
    both = folder / "both.pem"
    both.write_text(Path(valid[0]).read_text() + Path(valid[1]).read_text())
    both.chmod(0o600)
    assert check_certificate(str(both), str(both)) == []


@pytest.mark.parametrize(("cert", "key", "option"), [("none", None, "cert"), (None, "none", "key")])
def test_a_missing_file_is_named(
    valid: tuple[str, str, str], cert: str | None, key: str | None, option: str
):
    with pytest.raises(AppError, match=f"--tls-{option}: none cannot be read: no such file"):
        check_certificate(cert or valid[0], key or valid[1])


def test_a_file_that_is_not_pem_is_named(valid: tuple[str, str, str], folder: Path):
    other = folder / "other.der"
    other.write_bytes(b"\x30\x82\x00\x00")
    with pytest.raises(AppError, match=r"--tls-cert: .*other\.der is not a PEM file"):
        check_certificate(str(other), valid[1])
    with pytest.raises(AppError, match=r"--tls-key: .*other\.der is not a PEM file"):
        check_certificate(valid[0], str(other))


def test_invalid_content_in_a_pem_file_is_rejected(valid: tuple[str, str, str], folder: Path):
    invalid = folder / "torn.pem"
    invalid.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(AppError, match="cannot be used"):
        check_certificate(str(invalid), valid[1])


def test_the_key_of_another_certificate_is_rejected(valid: tuple[str, str, str], folder: Path):
    _, other, _ = issue_certificate(folder, "other")
    with pytest.raises(AppError, match=r"--tls-key: .* does not match the certificate in "):
        check_certificate(valid[0], other)


def test_a_key_with_a_passphrase_is_rejected_without_a_prompt(
    valid: tuple[str, str, str], folder: Path
):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(valid[1]).read_bytes(), None)
    encrypted = folder / "locked.pem"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    with pytest.raises(AppError, match="keys with a passphrase are not supported"):
        check_certificate(valid[0], str(encrypted))


def test_an_expired_or_future_certificate_is_used_with_a_warning(folder: Path):
    """A restart must not fail because a certificate has expired."""
    old = issue_certificate(folder, "old", not_before=in_days(-60), not_after=in_days(-1))
    [warning] = check_certificate(old[0], old[1])
    assert "clients that verify certificates will reject" in warning
    assert "expired" in warning
    early = issue_certificate(folder, "early", not_before=in_days(2), not_after=in_days(60))
    [warning] = check_certificate(early[0], early[1])
    assert "not yet valid" in warning


def test_a_certificate_that_expires_soon_gives_a_warning(folder: Path):
    end = in_days(5)
    soon = issue_certificate(folder, "soon", not_before=in_days(-60), not_after=end)
    [warning] = check_certificate(soon[0], soon[1])
    assert f"expires on {end:%Y-%m-%d}" in warning


def test_a_key_readable_by_others_gives_a_warning(folder: Path):
    cert, key, _ = issue_certificate(folder, "readable")
    Path(key).chmod(0o644)
    [warning] = check_certificate(cert, key)
    assert f"chmod 600 {key}" in warning


def test_a_checked_certificate_is_accepted_by_clients(valid: tuple[str, str, str]):
    cert, key, ca = valid
    check_certificate(cert, key)

    async def hello(scope, receive, send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    with serve_app(hello, lifespan="off", ssl_certfile=cert, ssl_keyfile=key) as url:
        context = ssl.create_default_context(cafile=ca)
        url = url.replace("http:", "https:")
        reply = httpx.get(url, verify=context, timeout=TIMEOUT)
        assert reply.text == "https"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, verify=ssl.create_default_context(), timeout=TIMEOUT)
