"""What tests of deployments need of the machine. Without it they are skipped, and say so."""

import shutil
from pathlib import Path

import pytest

from tests.deploy.nginx import Certificate


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    for program in ("nginx", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: `apt-get install nginx-light openssl`, or your system's")
    folder: Path = tmp_path_factory.mktemp("certificate")
    return Certificate.make(folder)
