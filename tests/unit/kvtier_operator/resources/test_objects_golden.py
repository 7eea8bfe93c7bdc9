"""Whole clusters as the API server gets them. A change of a builder shows here as a diff that people can read.

KVTIER_UPDATE_GOLDEN=1 pytest tests/unit/kvtier_operator/resources/test_objects_golden.py    # writes the files anew
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator.api import parse
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.testing.rendered import staged

GOLDEN = Path(__file__).parents[3] / "golden"
CLUSTERS = sorted((GOLDEN / "clusters").glob("*.yaml"))


class Dumper(yaml.SafeDumper):
    """Text of several lines as it stands, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def render(document: Mapping[str, Any]) -> str:
    made = staged(parse(document))
    return "".join(f"---\n# {stage.name.lower()}\n{dump(manifest)}" for stage in Stage for manifest in made[stage])


def dump(manifest: Manifest) -> str:
    return yaml.dump(manifest, Dumper=Dumper, sort_keys=False, width=200)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_objects_of_a_cluster_are_those_on_file(path: Path) -> None:
    expected = GOLDEN / "objects" / path.name
    rendered = render(yaml.safe_load(path.read_text()))
    if os.environ.get("KVTIER_UPDATE_GOLDEN"):
        expected.write_text(rendered)
    assert rendered == expected.read_text(), "a builder changed; look at the diff after KVTIER_UPDATE_GOLDEN=1"


def test_no_file_is_left_of_a_cluster_that_is_gone() -> None:
    assert [path.name for path in sorted((GOLDEN / "objects").glob("*.yaml"))] == [path.name for path in CLUSTERS]
