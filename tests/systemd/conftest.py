"""One booted container with the service installed, for each module."""

from collections.abc import Iterator

import pytest
from booted_container import BootedContainer, Impossible
from installed_service import InstalledService


@pytest.fixture(scope="module")
def container() -> Iterator[BootedContainer]:
    """A container that is up."""
    try:
        booted = BootedContainer()
    except Impossible as reason:
        pytest.skip(str(reason))
    try:
        booted.boot()
        yield booted
    finally:
        booted.close()


@pytest.fixture(scope="module")
def installed(container: BootedContainer) -> InstalledService:
    """The service, installed by `make install`."""
    service = InstalledService(container)
    service.install()
    return service


@pytest.fixture
def service(installed: InstalledService) -> InstalledService:
    """The service, running, without a past."""
    installed.begin_afresh()
    return installed
