"""YAML that kubectl must read as the strings that we mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kvtier_operator.controller import dry_run
from kvtier_operator.manifest import load

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.mark.parametrize("revision", ["12e45678", "12345678", "0x123456", "1e-3", "77cfbd96"])
def test_text_that_looks_like_a_number_is_quoted(revision: str) -> None:
    text = yaml.dump({"label": revision}, Dumper=dry_run._Dumper)
    assert yaml.safe_load(text) == {"label": revision}
    quoted = revision != "77cfbd96"
    assert (f"'{revision}'" in text) is quoted


def test_an_example_comes_back_as_it_was_rendered() -> None:
    text = dry_run.render(load(EXAMPLES / "ha.yaml"))
    assert all(document["metadata"]["labels"] for document in yaml.safe_load_all(text))
