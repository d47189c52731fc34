"""Images from allowed hosts, and URLs and addresses that must not reach any other."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import pytest
import trustme

from app.core.errors import AppError, ErrorKind
from app.images.fetch import ImageFetcher, is_host_name, is_public_address
from app.images.headers import MAX_BYTES

HOST = "images.example.com"
AUTHORITY = trustme.CA()

INTERNAL = [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "0", "0.0.0.0",
    "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[fe80::1]", "[fc00::1]",
    "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "localhost", "localhost.", "metadata",
    "metadata.google.internal", "127.0.0.1.nip.io", "example.com", "evil.com",
    "images.example.com.evil.com", "evilimages.example.com", "images.example.co", "example",
    "xn--images-example.com", "images-example.com", "a.images.example.com", "images..example.com",
    ".images.example.com", "images.example.com.", "images.example.com..", "IMAGES.EXAMPLE.COM.",
    "images.example.com%00", "images.example.com%2eevil.com", "images.example.com%2f",
    "images.example.com\\", "images.example.com\\@evil.com", "images.example.com\t",
    "images.example.com\n", "images.example.com ", " images.example.com", "images。example。com",
    "ｉmages.example.com", "imageſ.example.com", "images.example.com\u200b", "images%2eexample.com",
    "images.example.com:80", "images.example.com:8443", "images.example.com:443:80",
    "images.example.com:", "images.example.com:0443", "images.example.com:+443",
    "user@images.example.com", "user:pass@images.example.com", "images.example.com@evil.com",
    "images.example.com:443@evil.com", "evil.com@images.example.com", "@images.example.com",
    "images.example.com&evil.com", "images.example.com;evil.com", "images.example.com,evil.com",
    "images_example.com", "-images.example.com", "images.example.com-", "*.example.com", "*", "",
]  # fmt: skip
SCHEMES = [
    "http://", "HTTP://", "ftp://", "file://", "file:///", "gopher://", "ws://", "wss://", "https:",
    "https:/", "https:///", "https:////", "https:\\\\", "https://\\", "//", "", "javascript:",
    "https ://", " https://", "\thttps://", "\nhttps://", "https\n://", "httpſ://", "https+http://",
    "https://https://", "jar:https://", "view-source:https://", "blob:https://", "url:https://",
    "unix://", "dict://", "ldap://", "sftp://", "tftp://", "s3://", "smb://", "\\\\", "php://",
    "https%3a//", "https:%2f%2f",
]  # fmt: skip
PATHS = [
    "/a b", "/a\tb", "/a\nb", "/a\r\nHost: evil.com", "/a\x00", "/ä", "/\u2028", "/a\x7f", "/ ",
    "?a=1", "\\a", ";a", "/a\r\n\r\nGET / HTTP/1.1", "/\x1f", "/a\u3000",
]  # fmt: skip
TRICKS = [
    *(f"https://{host}/a.png" for host in INTERNAL),
    *(f"https://{HOST.upper()}{host}/a.png" for host in INTERNAL if host),
    *(f"{scheme}{HOST}/a.png" for scheme in SCHEMES),
    *(f"https://{HOST}{path}" for path in PATHS),
]

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_there_are_200_tricks():
    assert len(set(TRICKS)) >= 200


def test_no_trick_resolves_any_name():
    async def run() -> None:
        fetcher = ImageFetcher([HOST], resolve=never)
        for url in TRICKS:
            with pytest.raises(AppError) as caught:
                await fetcher.read_url(url, "input.0")
            assert caught.value.kind is ErrorKind.INVALID, url
            assert caught.value.message.startswith("input.0: the image was not fetched: "), url

    async def never(host: str) -> list[str]:
        raise AssertionError(host)

    asyncio.run(run())


def test_without_hosts_nothing_is_fetched():
    with pytest.raises(AppError, match="this server does not fetch images: send a data URL"):
        asyncio.run(ImageFetcher([]).read_url(f"https://{HOST}/a.png", "input.0"))


def test_a_data_url_needs_no_host():
    for hosts in ([], [HOST]):
        data = asyncio.run(ImageFetcher(hosts).read_url("data:image/png;base64,aGk=", "input.0"))
        assert data == b"hi"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.255.254", "10.0.0.1", "172.31.0.1", "192.168.0.1", "169.254.169.254",
        "100.64.0.1", "100.127.255.255", "0.0.0.0", "255.255.255.255", "224.0.0.1", "239.1.1.1",
        "240.0.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "::1",
        "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "::ffff:8.8.8.8",
        "::ffff:127.0.0.1", "::8.8.8.8", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "2002:808:808::1",
        "2001:0:1::1", "2001:db8::1", "100::1", "not an address",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused(address: str):
    assert not is_public_address(address)

    async def resolve(host: str) -> list[str]:
        return ["93.184.215.14", address]

    with pytest.raises(AppError, match="its host has no public address"):
        asyncio.run(
            ImageFetcher([HOST], resolve=resolve).read_url(f"https://{HOST}/a.png", "input.0")
        )


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700::1111"])
def test_a_public_address_is_allowed(address: str):
    assert is_public_address(address)


@pytest.mark.parametrize("name", ["example.com", "a.b-c.example", "Images.Example.COM"])
def test_a_host_is_a_name_with_a_dot(name: str):
    assert is_host_name(name)


@pytest.mark.parametrize("name", ["", "localhost", "127.0.0.1", "[::1]", "*.a.com", "a.com:443"])
def test_other_hosts_cannot_be_listed(name: str):
    assert not is_host_name(name)


def fetch(answer: Answer, url: str = f"https://{HOST}:443/a/b.png?c=1#d") -> bytes:
    """Returns the data fetched from a TLS server on this machine that answers like this."""

    async def resolve(host: str) -> list[str]:
        assert host == HOST
        return ["127.0.0.1"]

    async def run() -> bytes:
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        AUTHORITY.issue_cert(HOST).configure_cert(served)
        trusted = ssl.create_default_context()
        AUTHORITY.configure_trust(trusted)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served)
        fetcher = ImageFetcher(
            [HOST.upper()],
            resolve=resolve,
            context=trusted,
            is_allowed_address=lambda _: True,
            port=server.sockets[0].getsockname()[1],
        )
        async with server:
            return await fetcher.read_url(url, "input.0")

    return asyncio.run(run())


def respond(response: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        writer.close()

    return answer


def test_the_request_has_no_credentials_and_names_the_host():
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage")
        writer.close()

    assert fetch(answer) == b"image"
    [head] = heads
    assert head.startswith(b"GET /a/b.png?c=1 HTTP/1.1\r\n")
    assert b"Host: images.example.com\r\n" in head
    assert not {b"cookie", b"authorization", b"referer"} & {
        line.partition(b":")[0].lower() for line in head.split(b"\r\n")
    }


def test_a_chunked_response_is_read():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert fetch(respond(head + b"3\r\nima\r\n2\r\nge\r\n0\r\n\r\n")) == b"image"


@pytest.mark.parametrize("status", [204, 301, 302, 307, 308, 403, 404, 500])
def test_redirects_and_errors_are_not_followed(status: int):
    head = f"HTTP/1.1 {status} X\r\nLocation: https://{HOST}/b\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(AppError, match=f"its host answered with status {status}"):
        fetch(respond(head.encode()))


@pytest.mark.parametrize(
    "head", [b"Content-Length: 30000000\r\n", b"", b"Transfer-Encoding: chunked\r\n"]
)
def test_a_large_image_is_not_read_to_its_end(head: bytes):
    body = bytes(MAX_BYTES + 1)
    if b"chunked" in head:
        body = f"{len(body):x}\r\n".encode() + body
    with pytest.raises(AppError, match="more than 20,000,000 bytes"):
        fetch(respond(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + body))


@pytest.mark.parametrize(
    "response",
    [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000,
     b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"],
)  # fmt: skip
def test_an_invalid_response_is_an_error(response: bytes):
    with pytest.raises(AppError, match="the connection failed"):
        fetch(respond(response))


def test_a_host_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.images.fetch._TIMEOUT", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    with pytest.raises(AppError, match="it took longer than"):
        fetch(answer)


def test_a_certificate_of_another_host_is_an_error(monkeypatch: pytest.MonkeyPatch):
    cert = AUTHORITY.issue_cert("other.example.com")
    monkeypatch.setattr(AUTHORITY, "issue_cert", lambda _: cert)
    with pytest.raises(AppError, match="the connection failed"):
        fetch(respond(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
