"""Folders of decoder-only models given as backbone: what works, and what is refused before any work starts.

Scripts run in this process: starting Python for every case would take most of the time.
"""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from slow import fast_where
from tiny_causal import byte_level_tokenizer, save_decoder
from transformers import AutoModelForCausalLM, BertConfig, BertModel, OPTConfig, OPTForCausalLM

from fedecider.data.sample import sample_domains
from fedecider.models.recommender import Recommender
from idgen.backbone import check_backbone, load_backbone
from idgen.quantize import quantize_of
from idgen.samples import empty_prompt
from idgen.tokenizer import load_tokenizer

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
(DOMAIN,) = sample_domains(["crime"]).values()
TOKENIZER = byte_level_tokenizer(DOMAIN.item_texts)
TINY = {
    "domains": "crime",
    "num_rounds": 2,
    "num_threads": 1,
    "local_epochs": 1,
    "batch_size": 64,
    "lora_rank": 2,
    "lora_targets": "attention,output",
    "num_eval_users": 5,
    "eval_batch_size": 60,
    "pretrain": {
        "text_encoder": "tfidf",
        "ids": "keywords",
        "samples": {
            "templates": "history",
            "max_history": 3,
            "max_source_tokens": 96,
        },
        "backbone": {"name_or_path": "decoder"},
        "train": {"max_steps": 2, "batch_size": 32},
    },
    "distill": {"epochs": 0},
}


def main(script: str, *words: str) -> int:
    first = sys.path[0]
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"](
            ["--config", "tiny.yaml", *words] if script in ("federate", "pretrain") else list(words)
        )
    finally:
        sys.path[0] = first


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """A folder with settings and a good model folder, ``decoder``, that may be damaged."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    save_decoder(tmp_path / "decoder", TOKENIZER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_says(**values):
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def a_gguf_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    (folder / "tiny.Q4_1.gguf").write_bytes(b"GGUF")


def an_encoder(folder: Path) -> None:
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}
    BertModel(BertConfig(vocab_size=len(TOKENIZER), **sizes)).save_pretrained(folder)


def other_parts(folder: Path) -> None:
    sizes = {"hidden_size": 4, "word_embed_proj_dim": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 4}
    OPTForCausalLM(OPTConfig(vocab_size=len(TOKENIZER), **sizes)).save_pretrained(folder)


def other_rows(spare: int):
    return lambda folder: save_decoder(folder, TOKENIZER, spare_rows=spare)


ROWS = len(TOKENIZER) + 7
REFUSED = {
    "an encoder": (an_encoder, ["of type 'bert' (BertModel)", "a decoder-only language model"]),
    "other parts": (other_parts, ["got a OPTForCausalLM, expected layers in model.layers"]),
    "a .gguf file": (a_gguf_alone, ["tiny.Q4_1.gguf", "GgufConfig(dequantize=True)", "save_pretrained"]),
    "packed on loading": (config_says(quantization_config={"quant_method": "gguf"}), ["(gguf)", "Remove"]),
    "packed weights": (
        config_says(quantization_config={"quant_method": "gptq", "bits": 4}),
        ["(gptq)", "take the model"],
    ),
    "a vocabulary grown": (config_says(vocab_size=ROWS - 3), [f"{ROWS} token embeddings", f"Set vocab_size to {ROWS}"]),
    "a vocabulary cut": (config_says(vocab_size=ROWS + 50), [f"{ROWS} token embeddings", f"Set vocab_size to {ROWS}"]),
    "a larger tokenizer": (other_rows(-1), [f"{ROWS - 8} token embeddings but the tokenizer {ROWS - 7} tokens"]),
    "a far smaller tokenizer": (other_rows(5000), ["token embeddings but the tokenizer"]),
    "scaled logits": (config_says(logit_scale=0.5), ["got logit_scale 0.5", "what lm_head returns"]),
    "a short window": (config_says(sliding_window=90), ["expected at most 90", "reads 90 tokens (sliding_window)"]),
    "a short context": (config_says(max_position_embeddings=95), ["got max_source_tokens 96, expected at most 95"]),
}


def refused(capsys, script: str, *words: str) -> str:
    """The one line on stderr of a call that ends with code 2 and leaves nothing behind."""
    capsys.readouterr()
    assert main(script, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 1100
    assert not Path("runs").exists()
    assert not list(Path(".cache").rglob("*"))
    return error


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_cannot_be_used_is_told_without_its_weights(case, inside, monkeypatch):
    change, expected = REFUSED[case]
    check_backbone("decoder", TOKENIZER, 96)
    change(inside / "decoder")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match=re.escape(expected[0])) as caught:
        check_backbone("decoder", TOKENIZER, 96)
    assert all(words in str(caught.value) for words in expected)


BY_SCRIPT = {"an encoder": "pretrain", "a .gguf file": "federate", "a larger tokenizer": "federate"}
"""Cases of the fast tests, each with a script; the slow tests call both with every case."""


@pytest.mark.parametrize(
    ("case", "script"),
    fast_where(BY_SCRIPT.items(), [(case, script) for case in REFUSED for script in ("pretrain", "federate")]),
)
def test_a_script_tells_it_before_the_work(case, script, inside, capsys, monkeypatch):
    change, expected = REFUSED[case]
    change(inside / "decoder")
    monkeypatch.setattr("fedecider.cross_silo.item_ids.make_item_ids", lambda *_: pytest.fail("work has begun"))
    error = refused(capsys, script)
    assert all(words in error for words in expected)


def test_a_context_without_room_for_the_longest_id_is_told_before_the_training(inside, capsys, monkeypatch):
    config_says(max_position_embeddings=97)(inside / "decoder")
    monkeypatch.setattr("fedecider.cross_silo.base_stages.train_backbone", lambda *_: pytest.fail("training has begun"))
    error = refused(capsys, "pretrain")
    assert "got max_source_tokens 96" in error
    assert "reads 97 tokens" in error


def test_a_tokenizer_with_an_end_token_alone_is_enough(inside):
    tokenizer = load_tokenizer("decoder")
    assert (TOKENIZER.pad_token, TOKENIZER.bos_token, TOKENIZER.chat_template) == (None, None, None)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert main("pretrain") == 0
    (stage,) = Path(".cache").glob("pretrain-*")
    model = load_backbone(stage / "backbone", load_tokenizer(stage / "backbone"))
    assert model.config.vocab_size == len(TOKENIZER)
    ids = json.loads((stage / "ids" / "crime.json").read_text())["items"]["token_ids"]
    assert len({tuple(tokens) for tokens in ids}) == len(DOMAIN.item_keys)
    assert max(map(len, ids)) > 3


class Killed(BaseException):
    """Nothing between the failing call and the test may catch it, as with a killed process."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
def test_a_run_from_a_folder_is_resumed_handed_over_and_evaluated(family, tied, inside, monkeypatch):
    save_decoder(inside / "decoder", TOKENIZER, family, tie_word_embeddings=tied)
    resumed_and_handed_over(monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_run_with_lists_is_resumed_handed_over_and_evaluated(inside, monkeypatch):
    """Titles below a heading, a fine-tuned student."""
    pretrain, samples = TINY["pretrain"], TINY["pretrain"]["samples"]
    changed = {
        "samples": {**samples, "templates": "list", "max_source_tokens": 200},
        "train": {**pretrain["train"], "table_lr_multiplier": 5.0},
    }
    distill = {"epochs": 1}
    settings = {**TINY, "pretrain": {**pretrain, **changed}, "distill": distill}
    (inside / "tiny.yaml").write_text(yaml.safe_dump(settings))
    save_decoder(inside / "decoder", TOKENIZER, num_hidden_layers=4)
    resumed_and_handed_over(monkeypatch)
    student = json.loads(Path("runs/whole/backbone/config.json").read_text())
    assert student["num_hidden_layers"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_run_on_a_quantised_base_is_evaluated_and_recommends(quantize, inside):
    pytest.importorskip("bitsandbytes")
    assert main("federate", "--output", "runs/whole", "--quantize", quantize) == 0
    assert main("evaluate", "--run", "runs/whole") == 0
    loaded = Recommender.from_pretrained(Path("runs/whole"), "crime")
    assert quantize_of(loaded.model) == quantize
    assert len(loaded.recommend(loaded.items.keys[:3], k=3)) == 3
    plain = AutoModelForCausalLM.from_pretrained("runs/whole/backbone", use_safetensors=True)
    assert quantize_of(plain) == "none"


def resumed_and_handed_over(monkeypatch):
    assert main("federate", "--output", "runs/whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr("fedecider.federation.state.save_file", dies_in_round_2)
        with pytest.raises(Killed):
            main("federate", "--output", "runs/killed")
    assert not Path("runs/killed/metrics.json").exists()
    assert [path.name for path in Path("runs/killed/checkpoints").glob("round_*")] == ["round_00001"]
    assert main("federate", "--output", "runs/killed", "--resume", "true") == 0
    whole, resumed = (json.loads(Path(f"runs/{name}/metrics.json").read_text()) for name in ("whole", "killed"))
    assert whole.pop("seconds") != resumed.pop("seconds")
    assert whole == resumed
    trees = sorted(Path("runs/whole/checkpoints/round_00002").glob("*.safetensors"))
    assert trees
    for path in [*trees, Path("runs/whole/adapters/crime/adapter_model.safetensors")]:
        tree, again = load_file(path), load_file(str(path).replace("whole", "killed"))
        assert all(torch.equal(tensor, again[name]) for name, tensor in tree.items())
    assert main("evaluate", "--run", "runs/killed") == 0
    scores_of_plain_peft(Path("runs/killed"))


def dies_in_round_2(tensors, path, **options):
    if "round_00002" in str(path):
        raise Killed
    save_file(tensors, path, **options)


def scores_of_plain_peft(folder: Path) -> None:
    """The log-probabilities of the first recommendations, from transformers and peft alone."""
    loaded = Recommender.from_pretrained(folder, "crime")
    history = [0, 1, 2]
    ranked = loaded.recommend([loaded.items.keys[item] for item in history], k=3)
    model = AutoModelForCausalLM.from_pretrained(folder / "backbone", use_safetensors=True)
    model = PeftModel.from_pretrained(model, str(folder / "adapters" / "crime")).eval()
    end = loaded.task.trie.eos_token_id
    prompt = empty_prompt(loaded.task)[0][0].tolist() if loaded.task.config.templates == "list" else []
    prompt += [token for item in history for token in (*loaded.task.item_ids.token_ids[item], end)]
    for item in ranked:
        target = [*loaded.task.item_ids.token_ids[list(loaded.items.keys).index(item.key)], end]
        with torch.no_grad():
            logit_WV = model(input_ids=torch.tensor([[*prompt, *target]])).logits[0]
        log_prob_TV = logit_WV[len(prompt) - 1 : -1].log_softmax(-1)
        assert float(log_prob_TV[range(len(target)), target].sum()) == pytest.approx(item.score, abs=1e-3)
