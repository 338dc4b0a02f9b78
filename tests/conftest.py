"""Shared fixtures: no network, one thread, the optional folder of real data."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from small_runs import decoder_settings, finished

REPOSITORY = Path(__file__).resolve().parents[1]
COMPILED = ("tests/embedding_fr/", "tests/deployment/test_users_on_sites.py")
"""Tests that take the functions of ``embedding_fr.compiled``: what one process has compiled another one need not."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws():
    """Whoever draws without a seed draws the same, whichever tests ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; skips with the reason when it is absent."""
    folder = Path(os.environ.get("FEDECIDER_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder} (set FEDECIDER_DATA)")
    return folder


@pytest.fixture(scope="session")
def decoder_run(tmp_path_factory) -> Path:
    """The folder of a finished run of a decoder with ensembles; whoever changes something takes a copy."""
    ensemble = {"kind": "logit"}
    return finished(tmp_path_factory.mktemp("decoder"), {**decoder_settings(), "ensemble": ensemble})


@pytest.fixture(scope="session")
def two_clients_run(tmp_path_factory) -> Path:
    """The same with two clients."""
    changed = {"domains": "crime,comics", "ensemble": {"kind": "logit"}}
    return finished(tmp_path_factory.mktemp("two_clients"), {**decoder_settings(), **changed})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """As with ``--dist loadfile``, with all files that compile the same functions in one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByCompiledCode(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "compiled" if nodeid.startswith(COMPILED) else super()._split_scope(nodeid)

    return ByCompiledCode(config, log)


@pytest.fixture(autouse=True)
def _skip_without_gpu(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
