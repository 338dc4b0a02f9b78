"""What a pretrained decoder knows about items: prompt only, after training on public events, at full and half depth.

    python benchmarks/pretrained_decoder.py --data <prepared> --model <folder> --folder pieces [--rows prompt,trained]
      [--output benchmarks/results/DATE-pretrained-decoder.md]

Settings: ``benchmarks/configs/amazon_smollm2.yaml``. Rows: "prompt", nothing trained; "trained", all weights on
catalogue walks and public users; "half", its student of half depth. Every row is ranked by
likelihood and, with --weights, by log p(ID | history) - w log p(ID | nothing); valid and test items of all clients.
Every row and every model is kept below --folder, so that a long table can be made in pieces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from learning_curves import METRICS, baselines, macro, sizes_of
from provenance import heading

from distill.train import distill
from fedecider.data.domain import Domain
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, history
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.prepare import Beginning, Settings, begin, client_tasks
from fedecider.federation.record import read_json, write_json
from fedecider.federation.streams import derive_seed
from fedecider.running.options import run
from idgen.backbone import load_backbone, train_backbone
from idgen.decode import constrained_beam_search, item_positions
from idgen.ranking import node_priors
from idgen.samples import Split, Task, empty_prompt, eval_batches
from idgen.tokenizer import load_tokenizer

CONFIG = Path(__file__).resolve().parent / "configs" / "amazon_smollm2.yaml"
CPU = torch.device("cpu")
Scores = dict[str, Any]


def ranked(model: Any, task: Task, split: Split, weight: float, settings: Settings, prior_N: Any) -> torch.Tensor:
    """(U,) places of the held-out items."""
    position_U = torch.zeros(len(task.sequences), dtype=torch.long)
    drop_seen = get_protocol(settings.run.protocol).drop_seen
    for user_B, *prompt, target_B in eval_batches(task, split, settings.ranking.eval_batch_size):
        trie = task.trie.scored(-weight * prior_N if weight else None)
        item_BK, _ = constrained_beam_search(model, *prompt, trie, settings.ranking.num_beams)
        seen = [history(task.sequences[user], split) for user in user_B.tolist()] if drop_seen else None
        position_U[user_B] = item_positions(item_BK, target_B, seen)
    return position_U


def measured(model: Any, tasks: list[Task], weights: list[float], splits: list[Split], settings: Settings) -> Scores:
    """Metrics by weight, split and domain, and what decoding took."""
    found: Scores = {}
    model = model.to(torch.bfloat16)  # no row trains it any further
    priors = [node_priors(model, *empty_prompt(task), task.trie) if any(weights) else None for task in tasks]
    for weight in weights:
        started = time.process_time()
        for split in splits:
            by_domain = {}
            for task, prior_N in zip(tasks, priors, strict=True):
                position_U = ranked(model, task, split, weight, settings, prior_N)
                by_domain[task.name] = mean_metrics(position_U, (10,))
            found[f"{split} {weight:g}"] = {**by_domain, "macro": macro(list(by_domain.values()))}
        users = len(splits) * sum(len(task.sequences) for task in tasks)
        found[f"seconds a user {weight:g}"] = (time.process_time() - started) / users
    return found


def model_of(row: str, made: Beginning, settings: Settings, folder: Path) -> tuple[Any, Scores]:
    """The model of a row, read or made, and how it was trained."""
    path, log = folder / f"model-{row}", folder / f"training-{row}.json"
    if row == "prompt":
        return made.model, {}
    if path.is_dir():
        return load_backbone(path, load_tokenizer(path)), read_json(log)
    started = time.process_time()
    if row == "trained":
        model, seed = made.model, derive_seed(settings.run.seed, "backbone training")
        report: Scores = {"log": train_backbone(model, made.tasks, settings.run.pretrain.train, seed)}
    else:
        teacher, seed = model_of("trained", made, settings, folder)[0], derive_seed(settings.run.seed, "distill")
        rate = settings.run.pretrain.train.learning_rate
        model, report = distill(teacher, made.tasks, settings.run.distill, seed=seed, finetune_rate=rate)
    report["seconds"] = time.process_time() - started
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(path)
    made.tokenizer.save_pretrained(str(path))
    write_json(log, report)
    return model, report


def table(args: argparse.Namespace, domains: Mapping[str, Domain]) -> list[str]:
    words = ["--config", str(CONFIG), "--data", args.data, "--cache", args.cache, "--seed", str(args.seed)]
    words += ["--pretrain.backbone.name_or_path", args.model, "--pretrain.text_encoder", args.encoder]
    settings, folder = parse_settings("", [*words, *args.set]), Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights, splits = [float(weight) for weight in args.weights.split(",")], args.splits.split(",")
    lines = [
        "| row | prior weight | valid ndcg@10 | test hit@10 | test ndcg@10 | by domain | CPU s a user |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for label, scores in baselines(args, domains).items():
        lines.append(f"| *{label}* | | | {scores['hit@10']:.4f} | {scores['ndcg@10']:.4f} | | |")
    for row in args.rows.split(","):
        path = folder / f"scores-{row}.json"
        if not path.is_file():
            made = begin(settings.run, domains, CPU)
            model, report = model_of(row, made, settings, folder)
            tasks = client_tasks(domains, made.ids, made.tokenizer, settings.run.pretrain)
            write_json(path, {"scores": measured(model, tasks, weights, splits, settings), "training": report})
        found = read_json(path)
        for weight in weights:
            test, valid = found["scores"][f"test {weight:g}"], found["scores"].get(f"valid {weight:g}")
            seconds = found["scores"][f"seconds a user {weight:g}"]
            chosen = f"{valid['macro']['ndcg@10']:.4f}" if valid else ""
            by_domain = ", ".join(f"{test[name]['ndcg@10']:.4f}" for name in domains)
            lines.append(
                f"| {row} | {weight:g} | {chosen} | {test['macro']['hit@10']:.4f} "
                f"| {test['macro']['ndcg@10']:.4f} | {by_domain} | {seconds:.2f} |"
            )
        print("\n".join(lines[-len(weights) :]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--domains", default="movies_tv,cds_vinyl,video_games")
    parser.add_argument("--rows", default="prompt,trained,half")
    parser.add_argument("--weights", default="0,0.5", help="prior weights, separated by commas")
    parser.add_argument("--splits", default="valid,test", help="valid,test or test alone")
    parser.add_argument("--encoder", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=".cache/pretrained-decoder")
    parser.add_argument("--cache", default=".cache")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    domains = load_domains(args.data, args.domains.split(","))
    lines = [
        "# A pretrained decoder",
        "",
        *heading("pretrained_decoder.py", args.threads),
        f"- Data: {sizes_of(domains)}",
        "",
    ]
    text = "\n".join([*lines, f"Macro mean of {', '.join(METRICS)}.", "", *table(args, domains)]) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
