from collections.abc import AsyncIterator

import pytest
from server import FaultServer


@pytest.fixture
async def fault_server() -> AsyncIterator[FaultServer]:
    """A fault server on a free port, with nothing counted yet."""
    async with FaultServer() as server:
        yield server
