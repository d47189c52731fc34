"""Requirements of the deployment tests. Without them, the tests are skipped with the reason."""

import shutil

import pytest

from tests.deploy.nginx import Certificate


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """The certificate of the nginx proxies in these tests."""
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx: `apt-get install nginx-light`, `brew install nginx`")
    return Certificate.make(tmp_path_factory.mktemp("certificate"))
