"""One setting on its way from `fd.federate` to the optimiser: few functions name it."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from small_runs import decoder_settings

import fedecider as fd

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = tuple(f"{REPOSITORY / name}/" for name in ("fedecider", "idgen", "distill", "embedding_fr"))
RATE = 0.00123
MOST_FUNCTIONS = 8


def test_the_learning_rate_passes_through_few_functions(decoder_run, monkeypatch):
    naming: set[str] = set()
    rates: set[float] = set()
    make = torch.optim.AdamW.__init__

    def made(self, groups, *args, **options):
        make(self, groups, *args, **options)
        rates.update(group["lr"] for group in self.param_groups)

    def profile(frame, event, arg):
        code = frame.f_code
        is_ours = event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(PACKAGES)
        if is_ours and "learning_rate" in (*code.co_names, *code.co_varnames, *code.co_consts):
            naming.add(f"{Path(code.co_filename).stem}.{code.co_qualname}")

    monkeypatch.setattr(torch.optim.AdamW, "__init__", made)
    sys.setprofile(profile)
    try:
        fd.federate(config=decoder_settings(), learning_rate=RATE, cache=str(decoder_run / ".cache"), progress=False)
    finally:
        sys.setprofile(None)
    assert rates == {RATE}
    assert len(naming) <= MOST_FUNCTIONS, sorted(naming)
