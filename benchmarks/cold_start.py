"""Cold start: items that no training has seen, added by their texts alone, against all other items of their catalogue.

    python benchmarks/cold_start.py --data <prepared> [--seeds 0,1,2] [--output FILE] [--set --pretrain.train.epochs 2]

A share of each catalogue's items is hidden: they leave the catalogue of stage 1, and their events leave the histories
of public users and clients. The decoder of ``amazon_decoder.yaml`` is trained on what is left (synthetic
histories, public users and train parts of the clients in one place), once with its item table and once with the table
frozen. Then the hidden items are added, and every client user whose test item is one of them is asked for it among all
items; the history is what is left of the events before. Users whose test item was always there show what the frozen
table costs. Every seed hides other items and trains another decoder. At the end the decoder with its table trained is
compared with the other rows, users paired, macro over the domains of all seeds; who is asked for in several is one
person.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from paired_rows import table
from provenance import heading, write_lines
from torch import Tensor

from fedecider.baselines.counts import NUM_CONTEXT, Votes, newest_weights, text_votes, train_counts, voted
from fedecider.cross_silo.base_stages import Beginning, begin
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.item_ids import client_tasks
from fedecider.cross_silo.prepare import Settings
from fedecider.data.domain import Domain, Events
from fedecider.data.encoders import chosen_encoder, load_encoder
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import MIN_EVENTS, get_protocol, rank_held_out
from fedecider.evaluation.statistics import PerDomain
from fedecider.federation.streams import derive_seed, stream
from fedecider.models.item_texts import encoded_texts
from fedecider.models.new_items import NewItem
from fedecider.running.command import run
from idgen.backbone_training import train_backbone
from idgen.events import event_table
from idgen.item_ids import ItemIds, unique_phrases
from idgen.new_items import append_rows
from idgen.ranking import RankingContext, rank_task
from idgen.tasks import catalogue_task
from idgen.tokenizer import encode_ids, known_phrases, with_phrases
from idgen.training import Execution

CONFIG = Path(__file__).resolve().parent / "configs" / "amazon_decoder.yaml"
TRAINED = "decoder, table trained"
TABLES = {
    TRAINED: [],
    "decoder, table frozen": ["--pretrain.train.table_lr_multiplier", "0"],
}
GROUPS = ("hidden", "old")
"""Users by their test item."""
NUM_BEAMS = 50
"""Items of the history take up to 20 of them before they are dropped."""
CPU = torch.device("cpu")


class Split(NamedTuple):
    """One domain: what training sees, and who is asked afterwards. Hidden items are numbered behind the old ones."""

    trained: Domain
    hidden: list[NewItem]
    asked: dict[str, list[list[int]]]
    """Group of users -> histories with the test item last."""
    users: dict[str, list[str]]
    """Group of users -> who they are."""


def hide(domain: Domain, share: float, seed: int) -> Split:
    """Take ``share`` of the items out of a domain, and with them their events."""
    num_items = len(domain.item_keys)
    drawn = torch.randperm(num_items, generator=stream(seed, "cold items", domain.name))
    hidden = set(drawn[: round(share * num_items)].tolist())
    old = [item for item in range(num_items) if item not in hidden]
    place = {item: number for number, item in enumerate([*old, *sorted(hidden)])}

    def rest(sequence: Sequence[int]) -> list[int]:
        return [place[item] for item in sequence if item not in hidden]

    def reduced(events: Events) -> Events:
        kept = [(user, rest(items)) for user, items in zip(events.users, events.sequences, strict=True)]
        kept = [(user, items) for user, items in kept if len(items) >= MIN_EVENTS]
        return Events([user for user, _ in kept], [items for _, items in kept], None)

    asked: dict[str, list[list[int]]] = {group: [] for group in GROUPS}
    users: dict[str, list[str]] = {group: [] for group in GROUPS}
    for user, sequence in zip(domain.clients.users, domain.clients.sequences, strict=True):
        history, group = rest(sequence[:-1]), "hidden" if sequence[-1] in hidden else "old"
        if len(history) >= MIN_EVENTS - 1:
            asked[group].append([*history, place[sequence[-1]]])
            users[group].append(user)
    trained = replace(
        domain,
        catalogue=domain.catalogue.part(domain.name, old),
        clients=reduced(domain.clients),
        public=reduced(domain.public),
    )
    taken = [NewItem(domain.item_keys[i], domain.titles[i], domain.item_texts[i]) for i in sorted(hidden)]
    return Split(trained, taken, asked, users)


def all_texts(splits: Mapping[str, Split], encoder: str, cache: str) -> dict[str, Tensor]:
    """Domain -> vectors of the texts of all items, hidden ones behind the others."""
    encoded = encoded_texts({name: split.trained for name, split in splits.items()}, encoder, cache)
    encode = load_encoder(encoder).encode
    return {
        name: torch.cat([encoded[name], encode([item.text for item in split.hidden]).float()])
        for name, split in splits.items()
    }


def settings_of(args: argparse.Namespace, seed: int, changes: Sequence[str]) -> Settings:
    words = ["--config", str(CONFIG), "--data", args.data, "--domains", args.domains, "--cache", args.cache]
    words += ["--num_beams", str(NUM_BEAMS), "--protocol", "strict"]
    return parse_settings([*words, "--seed", str(seed), "--pretrain.text_encoder", args.encoder, *args.set, *changes])


def positions(
    made: Beginning, settings: Settings, splits: Mapping[str, Split], encoded: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Group of users -> domain -> places of their test items among all items; a copy of the model gets the hidden."""
    keys = {name: [item.key for item in split.hidden] for name, split in splits.items()}
    texts = {name: [item.text for item in split.hidden] for name, split in splits.items()}
    phrases = unique_phrases(keys, texts, settings.run.pretrain.words, known_phrases(made.tokenizer))
    tokenizer = with_phrases(made.tokenizer, [phrase for of_domain in phrases.values() for phrase in of_domain])
    assert made.projection is not None
    model = copy.deepcopy(made.model)
    row_ND = [made.projection.rows(name, encoded[name][-len(split.hidden) :]) for name, split in splits.items()]
    append_rows(model, torch.cat(row_ND))
    drop_seen = get_protocol(settings.run.protocol).drop_seen
    found: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
    for name, split in splits.items():
        old = made.ids[name].items
        tokens = [*old.token_ids, *encode_ids(tokenizer, phrases[name])]
        ids = ItemIds([*old.texts, *phrases[name]], tokens, {})
        task = catalogue_task(name, ids, tokenizer, settings.run.pretrain.samples)
        for group in GROUPS:
            events = event_table(split.asked[group], True)
            asked = task._replace(sequences=split.asked[group], train=events)
            found[group][name] = rank_task(model, asked, "test", None, RankingContext(settings.ranking, drop_seen))
    return found


def baseline_positions(
    encoded: Mapping[str, Tensor], splits: Mapping[str, Split], group: str
) -> dict[str, dict[str, Tensor]]:
    """Text neighbours over all items, and popularity in what training sees."""
    text, popular = {}, {}
    for name, split in splits.items():
        asked, num_items = split.asked[group], len(encoded[name])
        votes = text_votes(nearest_texts(unit_vectors(encoded[name].numpy())))

        def score(user_B: Tensor, asked: Any = asked, votes: Votes = votes, num_items: int = num_items) -> Tensor:
            return voted(newest_weights(asked, user_B, "test", num_items, NUM_CONTEXT), votes).dense()

        text[name] = rank_held_out(score, asked, num_items, "test")
        count_I = train_counts(split.trained.clients.sequences, num_items, split.trained.public.sequences)
        popular[name] = rank_held_out(
            lambda user_B, count_I=count_I: count_I.expand(len(user_B), -1), asked, num_items, "test"
        )
    return {"popularity": popular, "text neighbours": text}


def line(label: str, seconds: str, found: Mapping[str, Mapping[str, Tensor]]) -> str:
    """hit@10 and ndcg@10 over the users of all domains, by group, with the standard error of hit@10."""
    cells = []
    for position in found.values():
        metrics = mean_metrics(torch.cat(list(position.values())), (10,))
        hit, num = metrics["hit@10"], sum(map(len, position.values()))
        cells += [f"{hit:.4f} ± {np.sqrt(hit * (1 - hit) / num):.4f}", f"{metrics['ndcg@10']:.4f}"]
    return f"| {label} | {seconds} | " + " | ".join(cells) + " |"


def rows_of_seed(
    args: argparse.Namespace, splits: Mapping[str, Split], seed: int, places: dict[str, dict[str, PerDomain]]
) -> Iterator[str]:
    """Lines of one seed's table as they come; ``places`` takes up group of users -> row -> domain -> places."""

    def row(label: str, seconds: str, found: Mapping[str, PerDomain]) -> str:
        for group in GROUPS:
            places[group][label] = found[group]
        return line(label, seconds, found)

    trained = {name: split.trained for name, split in splits.items()}
    encoded = all_texts(splits, args.encoder, args.cache)
    for group in GROUPS:
        sizes = {name: len(split.asked[group]) for name, split in splits.items()}
        yield f"- users whose test item is {group}: {sum(sizes.values())} {sizes}"
    yield f"- hidden items: { {name: len(split.hidden) for name, split in splits.items()} }\n"
    yield "| row | CPU s of training | hidden: hit@10 | ndcg@10 | old: hit@10 | ndcg@10 |"
    yield "|---|---:|---:|---:|---:|---:|"
    found = {group: baseline_positions(encoded, splits, group) for group in GROUPS}
    for label in ("popularity", "text neighbours"):
        yield row(label, "", {group: by_row[label] for group, by_row in found.items()})
    for label, changes in TABLES.items():
        settings = settings_of(args, seed, changes)
        made = begin(settings.run, trained, CPU)
        if label != TRAINED:
            yield row("decoder before training", "0", positions(made, settings, splits, encoded))
        clients = client_tasks(trained, made.ids, made.tokenizer, settings.run.pretrain)
        started = time.process_time()
        execution = Execution(derive_seed(seed, "cold start"))
        train_backbone(made.model, [*made.tasks, *clients], settings.run.pretrain.train, execution)
        seconds = time.process_time() - started
        yield row(label, f"{seconds:.0f}", positions(made, settings, splits, encoded))


def rows(args: argparse.Namespace) -> Iterator[str]:
    if chosen_encoder(args.encoder) == "tfidf":
        raise ValueError("got encoder tfidf, expected a sentence encoder: TF-IDF cannot encode a text that comes later")
    domains = load_domains(args.data, args.domains.split(","))
    joined: dict[str, dict[str, dict[str, Tensor]]] = {group: {} for group in GROUPS}
    persons: dict[str, dict[str, list[str]]] = {group: {} for group in GROUPS}
    for seed in args.seeds:
        yield f"\n## Seed {seed}\n"
        splits = {name: hide(domain, args.share, seed) for name, domain in domains.items()}
        places: dict[str, dict[str, PerDomain]] = {group: {} for group in GROUPS}
        yield from rows_of_seed(args, splits, seed, places)
        for group in GROUPS:
            persons[group] |= {f"{name}, seed {seed}": split.users[group] for name, split in splits.items()}
            for label, of_domain in places[group].items():
                joined[group].setdefault(label, {}).update(
                    {f"{name}, seed {seed}": position for name, position in of_domain.items()}
                )
    for group in GROUPS:
        yield f"\n## Users whose test item is {group}, all seeds\n"
        yield from table(joined[group], persons[group], [TRAINED])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--domains", default="movies_tv,cds_vinyl,video_games")
    parser.add_argument("--share", type=float, default=0.1, help="of the items of each catalogue that are hidden")
    parser.add_argument("--encoder", default="auto")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", default=".cache")
    parser.add_argument("--output", type=Path, help="Markdown file; lines are appended as they come")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of the decoder")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    write_lines(chain(["# Cold start", "", *heading("cold_start.py", args.threads)], rows(args)), args.output)


if __name__ == "__main__":
    sys.exit(run(main))
