"""The command with recommenders that compute nothing: python toy_server.py DELAY_S [options of fedecider serve]."""

import os
import sys
import time
from pathlib import Path

import no_models  # noqa: F401
from serve_toys import TITLES, ToyRecommender

from fedecider.cli.serve import main
from fedecider.serve import run


class Slow(ToyRecommender):
    def recommend(self, histories, k=10, repeats="learned"):
        if place := os.environ.get("TOY_ASKED"):  # tells whoever waits for it that a request has arrived
            Path(place).write_text(histories[0][0])
        time.sleep(float(sys.argv[1]))
        if "crime-0003" in histories[0]:
            raise KeyError(f"history {histories[0]}")
        return super().recommend(histories, k, repeats)


def load_recommenders(config):
    """As many titles as the file says, where there is one: the next version of a run."""
    place = os.environ.get("TOY_TITLES")
    return {"crime": Slow("crime", TITLES[: int(Path(place).read_text())] if place else TITLES)}


run.load_recommenders = load_recommenders
sys.exit(main(["--run", "toy", "--port", "0", *sys.argv[2:]]))
