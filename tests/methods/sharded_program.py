"""Two rounds of FeDecider on a toy, through DeepSpeed where the environment asks for it: FOLDER."""

import json
import os
import sys
from pathlib import Path

from safetensors.torch import save_file
from toy_recommender import on, run, toy_recommender, toy_t5

from fedecider.methods import METHODS
from fedecider.models.export import load_adapter, save_peft_folder
from fedecider.running.launch import start


def main(folder: Path) -> None:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # one process needs none, and it takes a minute
    with start(1) as launch:
        recommender = on(toy_recommender(local_epochs=10), deepspeed=launch.deepspeed)
        assert (recommender.base.deepspeed is not None) == bool(os.environ.get("ACCELERATE_USE_DEEPSPEED"))
        method = METHODS["fedecider"].build(recommender, METHODS["fedecider"].config())
        state, records = run(method, recommender.num_clients, 2)
        own = {name: tensor[0] for name, tensor in state.local.items()}
        entry = METHODS["fedecider"]
        model = entry.client_model(recommender, entry.config(), "local", None, own, 0)
        save_peft_folder(model.adapters.factors(), folder, "x", "SEQ_2_SEQ_LM")
        load_adapter(toy_t5(), folder)
    tensors = {name: tensor.contiguous() for name, tensor in {**state.server, **state.local}.items()}
    save_file(tensors, folder / "state.safetensors")
    (folder / "records.json").write_text(json.dumps(records, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
