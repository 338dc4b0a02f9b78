"""Settings of a run that belong to no single room; every field is an option of the command line and a YAML key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from distill.train import DistillConfig
from fedecider.bounds import LoraRank, OneOrMore, Participation, Seed, Threads, at_least, check
from fedecider.evaluation.protocols import get_protocol
from fedecider.lora.adapters import LoraSettings
from idgen.alternating import AlternatingConfig
from idgen.backbone import BackboneConfig
from idgen.draws import SampleConfig
from idgen.id_generator import IDGeneratorConfig
from idgen.item_ids import IdConfig
from idgen.keywords import KeywordConfig
from idgen.training import BackboneTraining


@dataclass(frozen=True)
class PretrainConfig:
    """Stage 1, on the public pool: tokenizer, item IDs, backbone.

    Args:
        tokenizer: Folder or hub name; empty takes the backbone's, or trains one on the item texts when the backbone
            is built from scratch.
        tokenizer_kind: Of a trained one: unigram, word pieces; word, one token for every frequent word; phrase, also
            one token for every item ID, which then is the item's shortest unique phrase (id_source keywords).
        vocab_size: Of a trained one, at most.
        id_source: Who writes item and user IDs: the ID generator, or the items' own keywords alone.
        keywords: Keyword targets of the ID generator, or the IDs themselves.
        id_limits: Limits of the search for unique IDs.
        id_generator: Size and training of the ID generator.
        samples: How histories become prompts; used in every stage.
        backbone: Where the backbone comes from, or its size.
        train: Optimisation of the backbone.
        alternating: Further phases that train ID generator and backbone in turns.
    """

    tokenizer: str = ""
    tokenizer_kind: Literal["unigram", "word", "phrase"] = "unigram"
    vocab_size: Annotated[int, at_least(1, most=10**6)] = 8000
    id_source: Literal["generator", "keywords"] = "generator"
    keywords: KeywordConfig = field(default_factory=KeywordConfig)
    id_limits: IdConfig = field(default_factory=IdConfig)
    id_generator: IDGeneratorConfig = field(default_factory=IDGeneratorConfig)
    samples: SampleConfig = field(default_factory=SampleConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    train: BackboneTraining = field(default_factory=BackboneTraining)
    alternating: AlternatingConfig = field(default_factory=AlternatingConfig)

    def __post_init__(self) -> None:
        check(self)
        if self.tokenizer_kind == "phrase" and self.id_source != "keywords":
            raise ValueError(
                f"got tokenizer_kind phrase with id_source {self.id_source}, expected keywords: a phrase is one token, "
                "which an ID generator cannot write word by word"
            )


@dataclass(frozen=True)
class RunConfig:
    """A federated run.

    Args:
        domains: Clients of the federation, separated by commas.
        data: Folder of prepared domains (scripts/prepare_data.py); empty uses the embedded sample.
        output: Run folder; empty makes one below ``runs/`` from method, domains and time.
        cache: Where pre-training and distillation are kept for later runs.
        method: Federated method.
        seed: Of every random draw; streams are derived from it by name.
        num_rounds: Rounds of local training and exchange (paper: 20 on Goodreads, 25 on Amazon).
        participation: Share of the clients that take part in a round.
        lora_rank: Rank of every adapter.
        lora_targets: Linear layers that get adapters, by the ends of their names: q, k, v, o of the attention (paper),
            wi and wo of the feed-forward part, lm_head for the output table.
        export_rank: Rank of the adapters that are handed over; the fusion's rank, clients x lora_rank, is cut down to
            it by singular values. 0 keeps it, which is exact.
        backbone_name: Hub name of the backbone, for the adapters and their model cards; empty names it by its place in
            the run folder, ../../backbone.
        num_threads: CPU threads per process, 0 for torch's choice; bit-equal results need equal numbers.
        protocol: How recommendations are counted; part of every reported number.
        resume: Go on with the run in ``output``.
        encoder: Of the texts in the report page: auto (MiniLM where it is installed, else tfidf), minilm, tfidf, or a
            folder or hub name for sentence-transformers.
        tracker: accelerate tracker for the rounds, such as tensorboard; empty for none.
        pretrain: Stage 1.
        distill: Stage 2.
    """

    domains: str = "crime,comics,children"
    data: str = ""
    output: str = ""
    cache: str = ".cache"
    method: str = "fedecider"
    seed: Seed = 0
    num_rounds: OneOrMore = 20
    participation: Participation = 1.0
    lora_rank: LoraRank = 8
    lora_targets: str = "q,k,v,o"
    export_rank: Annotated[int, at_least(0, hint="0 exports the rank that was trained")] = 0
    backbone_name: str = ""
    num_threads: Threads = 0
    protocol: str = "strict"
    resume: bool = False
    encoder: str = "auto"
    tracker: str = ""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    def __post_init__(self) -> None:
        check(self)
        if not self.domain_names or len(set(self.domain_names)) != len(self.domain_names):
            raise ValueError(f"got domains {self.domains!r}, expected different names separated by commas")
        _ = self.lora_settings  # checks the targets
        if get_protocol(self.protocol).num_sampled is not None:
            raise ValueError(
                f"got protocol {self.protocol!r}: beam search ranks the whole catalogue, expected strict or "
                "strict/keep_seen"
            )
        if self.resume and not self.output:
            raise ValueError("got resume without output, expected the folder of the run: --output runs/<name>")

    @property
    def lora_settings(self) -> LoraSettings:
        names = (name.strip() for name in self.lora_targets.split(","))
        return LoraSettings(self.lora_rank, tuple(name for name in names if name))

    @property
    def domain_names(self) -> list[str]:
        return [name.strip() for name in self.domains.split(",") if name.strip()]
