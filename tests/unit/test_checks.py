"""What a node lacks is named."""

from __future__ import annotations

import pytest

import clusterenv as ce


def make_with_missing_package():
    import a_package_that_nobody_has  # noqa: F401


def test_a_package_that_is_missing_on_a_node():
    backend = ce.Loopback(nodes=2)
    with pytest.raises(ce.EnvError, match=r"'a_package_that_nobody_has' is missing on node [01]: install it there"):
        ce.ClusterEnv(make_with_missing_package, 2, backend=backend)
