"""What tests of deployments need of the machine. Without it they are skipped, and say so."""

import shutil

import pytest

from tests.deploy.nginx import Certificate


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """For the proxies of these tests; they are all nginx."""
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx: `apt-get install nginx-light`, `brew install nginx`")
    return Certificate.make(tmp_path_factory.mktemp("certificate"))
