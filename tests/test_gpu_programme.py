"""The GPU programme with toy sizes on the CPU, and the same work on CUDA compared with the CPU."""

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from slow import slow
from tiny_causal import byte_level_tokenizer, save_decoder

from fedecider.cross_silo.base_stages import distill_stage, pretrain_stage
from fedecider.cross_silo.item_ids import client_tasks, load_ids
from fedecider.cross_silo.settings import PretrainConfig, RunConfig
from fedecider.data.sample import sample_domains
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.federation.callbacks import collecting
from fedecider.federation.method import Block
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.methods import METHODS
from fedecider.methods.client_models import client_models
from fedecider.methods.config import LocalTraining
from fedecider.models.adapters import attach_lora, base_hash
from fedecider.models.client_model import Base
from fedecider.models.config import LoraSettings
from idgen import alternating, id_generator, soft_ids
from idgen.backbone import load_backbone
from idgen.backbone_training import train_backbone
from idgen.config import BackboneConfig, BackboneTraining, SampleConfig
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig
from idgen.tokenizer import load_tokenizer
from idgen.training import Execution

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def programme():
    return importlib.import_module("gpu_programme")


def table(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.slow
def test_toy_programme_leaves_every_row(programme, tmp_path, capsys):
    tokenizer = byte_level_tokenizer(sample_domains(["crime"])["crime"].item_texts)
    save_decoder(tmp_path / "tiny", tokenizer, max_position_embeddings=1024)
    words = ["--toy", "--work", str(tmp_path)]
    assert programme.main([*words, "--parts", "pretrained"]) == 0
    assert "pretrained: not done: no folder" in capsys.readouterr().out
    words += ["--model", str(tmp_path / "tiny")]
    assert programme.main(words) == 0, capsys.readouterr().out
    page = tmp_path / "toy" / "page.md"
    for heading in ("Date: 20", "Versions: Python", "Hardware: ", "Command: `python benchmarks/gpu_programme.py"):
        assert f"- {heading}" in page.read_text(), heading
    rows = table(page)
    assert [row[0] for row in rows] == [
        "gpu_tests",
        *["training"] * 2,
        *["fusion"] * 2,
        *["decode"] * 2,
        *["quantized"] * (4 if find_spec("bitsandbytes") else 0),
        "embedding",
        *["deepspeed"] * (3 if find_spec("deepspeed") else 0),
        "pretrained",
        *["end_to_end"] * 2,
        *[
            f"dense-{dataset}-{kind}"
            for dataset in ("beauty", "toys", "sports")
            for kind in ("t5", "decoder")
            for _ in "12"
        ],
    ]
    whats = " / ".join(row[1] for row in rows)
    for what in ("pytest -m gpu", "fp32, batch 16", "bf16, batch 16", "LoRA round, plain", "K = 3 directions"):
        assert what in whats, what
    for what in ("20 beams, 60 items, bf16", "tiny, base", "T5, dense head", "decoder, half depth"):
        assert what in whats, what
    for row in rows[1:7]:
        number, unit = row[2].split()
        assert float(number.replace(",", "")) > 0
        assert unit == ("users" if "beams" in row[1] else "samples")


def test_a_finished_part_is_not_run_again_and_a_failed_one_is(programme, tmp_path, capsys, monkeypatch):
    calls = []

    def part(todo):
        calls.append(todo.device)
        yield programme.Row("what", "-", "1.0", "-", "a|b")
        assert len(calls) > 1, "no luck"

    monkeypatch.setitem(programme.PARTS, "fusion", part)
    words = ["--toy", "--parts", "fusion", "--work", str(tmp_path)]
    assert programme.main(words) == 1
    assert "fusion: FAILED, AssertionError: no luck" in capsys.readouterr().out
    assert not (tmp_path / "toy" / "page.md").exists()
    assert [programme.main(words), programme.main(words), len(calls)] == [0, 0, 2]
    assert table(tmp_path / "toy" / "page.md") == [["fusion", "what", "-", "1.0", "-", "a/b"]]


@pytest.mark.gpu
def test_cuda_trains_and_decodes_like_the_cpu(programme):
    """Same weights, batches and steps in fp32 without dropout; sums are only taken in another order."""
    losses, lists = {}, {}
    config = BackboneTraining(batch_size=16, max_steps=20)
    for name in ("cpu", "cuda"):
        bench = programme.make_bench(programme.TOY, torch.device(name))
        host = programme.new_backbone(bench._replace(device=torch.device("cpu")))
        model = host.to(name)
        logs = train_backbone(model, bench.public, config, Execution(0, torch.device(name)))
        losses[name] = [log["loss"] for log in logs]
        users = torch.arange(24)
        lists[name] = programme.recommendations(model, bench.clients[1], users, 20, "fp32", bench.device)
        programme.check_lists(lists[name], programme.TOY.num_items, 20)
        if name == "cuda":
            half = programme.recommendations(model, bench.clients[1], users, 20, "bf16", bench.device)
            programme.check_lists(half, programme.TOY.num_items, 20)
            programme.agreement(lists[name], half, 0.8, 0.03)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["cuda"][-1] < losses["cuda"][0]
    programme.agreement(lists["cpu"], lists["cuda"], 0.9, 5e-3)


def test_cudnns_attention_is_off():
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
def test_masked_attention_has_finite_gradients():
    """Where cuDNN's kernel gives NaN (pytorch#196678): a mask, 64 keys beyond a multiple of 128, logits far below 0."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, upstream = (
        0.1 * torch.randn(1, 1, 64, 64, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(4)
    )
    query[..., 0], key[..., 0] = 1.0, -120 * 64**0.5
    query.requires_grad_()
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()[None, None]
    F.scaled_dot_product_attention(query, key, value, attn_mask=mask).backward(upstream)
    assert query.grad is not None
    assert torch.isfinite(query.grad).all()


@pytest.mark.parametrize("name", [slow("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_stages_run_on_the_device(name, tmp_path, monkeypatch):
    """Generator, alternating training, backbone, distillation and two rounds of fusion, in bf16."""
    device = torch.device(name)
    for module in (id_generator, soft_ids):
        monkeypatch.setattr(module, "MAX_TEXT_TOKENS", 24)
    monkeypatch.setattr(alternating, "GENERATOR_BATCH", 256)
    pretrain = PretrainConfig(
        samples=SampleConfig(max_history=3, max_source_tokens=128),
        backbone=BackboneConfig(d_model=32, num_layers=2),
        train=BackboneTraining(batch_size=128, learning_rate=3e-3, precision="bf16"),
        alternating_phases=1,
    )
    config = RunConfig(domains="crime,comics", cache=str(tmp_path), pretrain=pretrain)
    domains = sample_domains(config.domain_names)
    first = pretrain_stage(config, domains, device, quiet=True)
    second = distill_stage(config, first, domains, device, quiet=True)
    tokenizer = load_tokenizer(second.folder / "backbone")
    ids = load_ids(first.folder, domains, pretrain)
    tasks = client_tasks(domains, ids, tokenizer, pretrain)
    model = attach_lora(load_backbone(second.folder / "backbone", tokenizer), LoraSettings(rank=4))
    training = LocalTraining(local_epochs=1, precision="bf16")
    ranking = RankingConfig(num_beams=10, num_eval_users=40, eval_batch_size=40)
    recommender = client_models(Base(model, tokenizer, RankingContext(ranking, device=device)), tasks, training, 0)
    before, records = base_hash(model), []
    method = METHODS["fedecider"].build(recommender, METHODS["fedecider"].config())
    blocks = [Block(torch.tensor([client]), task) for client, task in enumerate(tasks)]
    state = run_rounds(
        method,
        Clients(blocks, metrics_per_client),
        RoundSettings(2, 0),
        callbacks=[collecting(records)],
    )
    assert base_hash(model) == before
    assert all(client["finite"] for record in records for client in record["clients"])
    assert all(value != 2.0 for client in records[1]["clients"] for value in client["alpha"])
    assert all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in state.server.values())
    assert all(0 <= one["hit@10"] <= 1 for record in records for variant in record["valid"].values() for one in variant)
