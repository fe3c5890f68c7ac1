from __future__ import annotations

from collections.abc import Iterator

import pytest

from lit_rl.cluster import Runtime


@pytest.fixture(scope="package")
def ray_runtime() -> Iterator[Runtime]:
    with Runtime("ray", num_cpus=2) as runtime:
        yield runtime


@pytest.fixture
def inline_runtime() -> Iterator[Runtime]:
    with Runtime("inline") as runtime:
        yield runtime
