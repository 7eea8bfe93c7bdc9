"""The flags of engines that the operator makes from manifests."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_operator.manifest import load
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.resources.engine import EnginePlace, StoreAddresses, engine_settings
from kvtier_operator.resources.master import MasterAddress

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_engines_of_the_examples_have_no_setting_without_effect(path: Path) -> None:
    cluster = load(path)
    store = StoreAddresses(MasterAddress("127.0.0.1:50051"))
    for role in cluster.roles:
        place = EnginePlace("/models/m", PortBlock(20000, 20100), role.port)
        settings = engine_settings(cluster, role, place, store)
        assert (settings.violations(), settings.warnings()) == ((), ())
