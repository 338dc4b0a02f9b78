"""A model folder that brings code: none of it is run, and nobody is asked whether it may."""

import io
import json
import sys

import pytest
from tiny_causal import byte_level_tokenizer, save_decoder

from idgen.backbone import load_backbone
from idgen.tokenizer import load_tokenizer

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "foreign"
class Model(LlamaForCausalLM): config_class = Config
class Words(PreTrainedTokenizerFast): pass
"""
MAP = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Words", "own.Words"]}


@pytest.mark.parametrize("known", [True, False])
def test_code_of_a_model_folder_is_never_run(tmp_path, monkeypatch, capsys, known):
    """``known``: the kind of model is one of transformers, and only its code is foreign."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "model", tmp_path / "ran"
    tokenizer = byte_level_tokenizer(["some words of a title"])
    save_decoder(folder, tokenizer)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    kinds = {} if known else {"model_type": "foreign", "architectures": ["Model"], "tokenizer_class": "Words"}
    for name, map_ in (("config.json", MAP), ("tokenizer_config.json", {"AutoTokenizer": MAP["AutoTokenizer"]})):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **kinds, "auto_map": map_}))
    answers = io.StringIO("y\n" * 20)
    for load in (lambda: load_tokenizer(folder), lambda: load_backbone(folder, tokenizer)):
        monkeypatch.setattr(sys, "stdin", answers)
        if known:
            assert type(load()).__module__.startswith("transformers.")
        else:
            with pytest.raises(ValueError, match=r"could be loaded|cannot load"):
                load()
    assert answers.tell() == 0, "a question was asked"
    assert not marker.exists()
