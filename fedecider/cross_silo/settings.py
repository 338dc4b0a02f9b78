"""Settings of a run that belong to no single room; every field is an option of the command line and a YAML key."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, NamedTuple

from distill.config import DistillConfig
from fedecider.bounds import LoraRank, OneOrMore, Seed, ShareAbove0, Threads, ZeroOrMore, dataclass
from fedecider.federation.config import PrivacyConfig, RobustMean
from fedecider.methods.config import COUNTS, LOCAL, LocalTraining
from fedecider.models.config import EnsembleConfig, LoraSettings
from idgen import config
from idgen.ranking_config import RankingConfig

NUM_WORDS = 4000
"""Of a tokenizer that is trained on the item texts, beside tokens of IDs."""


@dataclass(frozen=True)
class PretrainConfig:
    """Stage 1 (pretrain): tokenizer, item IDs and backbone, from the public pool.

    Args:
        ids: What item IDs are made of: "generator", words of the item's text that the ID generator chooses; "keywords",
            its most telling words; "semantic", codes of its text vector, near texts sharing the first ones; or "item",
            one token. Tokens of the last two are of a tokenizer that is trained with them.
        id_generator: The folder or hub name of a T5 that writes tags; if empty, a small T5 is trained from scratch on
            the items' keywords.
        samples: How histories become prompts; used in every stage.
        text_encoder: The encoder of item texts: auto (which is minilm), minilm, tfidf, keys (a random vector
            each, where items have keys alone), or a folder or hub name for
            sentence-transformers. Text neighbours, synthetic histories (synthetic_share), a start from texts
            (embedding_init text) and the distances in the report are made with it.
        backbone: Where the backbone comes from, or its size.
        train: Optimisation of the backbone.
        alternating_phases: The number of turns of the ID generator; 0 leaves the IDs as they are. Each comes after one
            of the backbone of train.epochs epochs, as is the end (IDGenRec, SIGIR 2024: 3 of 10 epochs).
    """

    ids: Literal["generator", "keywords", "semantic", "item"] = "generator"
    id_generator: str = ""
    samples: config.SampleConfig = field(default_factory=config.SampleConfig)
    text_encoder: str = "auto"
    backbone: config.BackboneConfig = field(default_factory=config.BackboneConfig)
    train: config.BackboneTraining = field(default_factory=config.BackboneTraining)
    alternating_phases: ZeroOrMore = 0

    def __post_init__(self) -> None:
        if self.backbone.kind == "t5" and self.backbone.name_or_path is None and self.samples.is_row:
            raise ValueError(
                f"got samples.templates {self.samples.templates} with a T5, expected natural or compact: a T5 reads "
                "the history in its encoder and writes one target. Set backbone.kind to decoder for a model that "
                "predicts every item of a history at once"
            )
        if self.train.table_lr_multiplier == 0.0 and not self.backbone.starts_from_texts:
            raise ValueError(
                f"got train.table_lr_multiplier 0 with backbone.kind {self.backbone.kind} and name_or_path "
                f"{self.backbone.name_or_path}, expected a decoder from scratch: only there do all tokens of item IDs "
                "start as vectors of item texts"
            )
        if self.alternating_phases > 0 and self.backbone.kind != "t5" and self.backbone.name_or_path is None:
            raise ValueError(
                "got alternating phases with a decoder, expected none: gradients reach the ID generator through the "
                "encoder of a T5. Set alternating_phases to 0"
            )
        if self.alternating_phases > 0 and self.ids != "generator":
            raise ValueError(
                f"got alternating phases with ids {self.ids}, expected generator: there is no ID generator to train. "
                "Set alternating_phases to 0"
            )
        if self.alternating_phases > 0 and self.train.max_steps:
            raise ValueError(
                f"got alternating phases with train.max_steps {self.train.max_steps}, expected 0: the phases count "
                "epochs"
            )

        if self.samples.dense_head and (self.ids == "item" or self.tokenizer_source):
            raise ValueError(
                f"got samples.dense_head with ids {self.ids} and tokenizer {self.tokenizer_source or 'of scratch'}, "
                "expected IDs of several tokens and a tokenizer that is trained with a token for each item. Set "
                "dense_head to false, or leave backbone.name_or_path and id_generator empty"
            )
        if self.samples.dense_head and not self.has_text_start:
            raise ValueError(
                f"got samples.dense_head with backbone.embedding_init {self.backbone.embedding_init}, expected text: "
                "the token of an item starts as the vector of its text. Set embedding_init to text"
            )
        if self.samples.dense_head and self.alternating_phases > 0:
            raise ValueError(
                "got samples.dense_head with alternating phases, expected one of them: IDs that change have no tokens "
                "of their own. Set alternating_phases to 0"
            )

    @property
    def tokenizer_source(self) -> str | None:
        """The folder or hub name of the tokenizer; None or empty where one is trained."""
        return self.backbone.name_or_path or self.id_generator

    @property
    def words(self) -> config.Words:
        """How an item's words become its ID, or the target of the ID generator: a pretrained model knows titles."""
        return config.TITLE_WORDS if self.backbone.name_or_path is None else config.TITLES_AS_WRITTEN

    def vocab_size(self, num_id_tokens: int) -> int:
        """The largest number of tokens of a trained tokenizer; 0 where nothing but item IDs is read."""
        ids_alone = self.ids in ("semantic", "item") and self.samples.templates == "history"
        return 0 if ids_alone else NUM_WORDS + num_id_tokens

    @property
    def has_own_tokens(self) -> bool:
        """Whether every item ID is sure to end with a token of its own: items are ranked without beams."""
        is_item = self.ids == "item" and self.samples.is_row and not self.tokenizer_source
        return is_item or self.samples.dense_head

    @property
    def needs_item_vectors(self) -> bool:
        """Whether stage 1 reads vectors of the item texts."""
        return self.has_text_start or self.samples.synthetic_share > 0.0 or self.ids == "semantic"

    @property
    def has_text_start(self) -> bool:
        """Whether the table of a backbone from scratch starts as vectors of the item texts."""
        return self.backbone.name_or_path is None and self.backbone.embedding_init == "text"


@dataclass(frozen=True)
class RunConfig:
    """Further settings of a federated run.

    Args:
        domains: The domains, which are the clients, separated by commas; with data, movies.* stands for all silos of
            movies.
        public_domains: The domains of an out-of-domain pool, separated by commas: backbone and student learn from their
            public users, and of the clients' domains from item texts alone. If empty, the public users are those of the
            clients' domains.
        data: The folder of prepared domains (scripts/prepare_data.py); if empty, the embedded sample is used.
        output: The output directory; if empty, one is made below runs/.
        cache: The folder in which pre-training and distillation are kept for later runs.
        method: The federated method.
        seed: The seed from which every random draw of the run is derived.
        seeds: The number of training runs, with seeds from seed on: figures and intervals are over all of them, and the
            first one is exported.
        num_rounds: The number of rounds of local training and exchange.
        patience: Stops after patience / participation rounds without a better validation ndcg@10; 0 runs all rounds.
        participation: The share of the clients that take part in a round.
        lora_rank: The rank of every adapter.
        lora_targets: The linear layers that get adapters, separated by commas: the roles attention (paper),
            feed_forward, output and table, or the ends of layers' names. output is the table of the tokens as it is
            read at the end; table is the same, and the embeddings that are tied to it.
        hyperparameter_candidates: A list of blocks of other settings for local training, each with lora_targets or
            options such as learning_rate. Before the first round every client trains alone for two rounds as given and
            with each block, each judged by its better round; what ranks the clients' validation items clearly best is
            taken. If empty, all is as given.
        quantize: The format of the frozen linear layers below the adapters, in the rounds and whenever the run is
            evaluated or asked: none, nf4 (4 bits) or int8; needs bitsandbytes (the extra gpu). The output layer, and
            what is exported, stay in full precision.
        robust_mean: The mean over clients, of methods whose server takes one: mean as it is; or median or trimmed_mean
            (without the largest and the smallest) of every number; or norm_clip, where no client counts for more than
            the median of their norms.
        secure_sum: If true, the server of a method that averages gets sums of masked uploads and no single one; clients
            that drop out of a round are left out of its sum.
        update_scales: The shares of its update, separated by commas, of which every client takes the one that ranks its
            own validation items best. 0 is the shared student, 1 alone the model as it was trained (paper).
        local_row: What every client would have alone: choose trains it beside the rounds, as many and as long, and
            keeps it where validation items like it clearly better (clients without a common item train alone only,
            where adapters are rows of items); show only shows it; off leaves it out.
        different_goods: If true, companies with catalogues of their own sell different goods; else a run ends before
            training where keys or titles say that many are the same and nobody has matched them (fedecider match).
        teacher_row: If true, the full-depth backbone is ranked without adapters as well, which costs about what ranking
            the test costs twice.
        num_threads: The number of CPU threads of a process; 0 leaves the choice to torch. Bit-equal results need equal
            numbers.
        protocol: The evaluation protocol: how recommendations are counted. strict holds out a customer's last event and
            drops what the customer had; next_basket holds out the last basket and drops nothing; last_month the last
            30 days of all data (last_month/2014-06-23: from that day on); auto takes next_basket where events have
            order numbers or customers buy again.
        customer_share: The share of every client's customers that take part, drawn by their keys; 100 of each do, if it
            has them. Figures are over these alone; catalogues and public users stay whole.
        drawn: What --minutes drew, in words.
        start_from: The finished run with whose adapters, stages and settings the rounds start; if empty, anew.
        resume: If true, the stopped run in output goes on.
        tracker: The accelerate trackers that get settings, scores of the rounds and test results, separated by commas,
            such as tensorboard,mlflow; empty for none. They write into the output directory.
        pretrain: Stage 1: tokenizer, item IDs and backbone, from the public pool.
        distill: Stage 2: the student of half depth.
        ensemble: What stands beside the model of every client, the private part of its ensemble.
        privacy: Bound and noise of what every client sends.
    """

    domains: str = "crime,comics,children"
    public_domains: str = ""
    data: str = ""
    output: str = ""
    cache: str = ".cache"
    method: str = "fedecider"
    seed: Seed = 0
    seeds: OneOrMore = 1
    num_rounds: OneOrMore = 20
    patience: ZeroOrMore = 0
    participation: ShareAbove0 = 1.0
    lora_rank: LoraRank = 8
    lora_targets: str = "attention"
    hyperparameter_candidates: tuple[dict[str, Any], ...] = ()
    quantize: config.Quantize = "none"
    robust_mean: RobustMean = "mean"
    secure_sum: bool = False
    update_scales: str = "0,0.25,0.5,0.75,1"
    local_row: Literal["choose", "show", "off"] = "choose"
    different_goods: bool = False
    teacher_row: bool = True
    num_threads: Threads = 0
    protocol: str = "auto"
    customer_share: ShareAbove0 = 1.0
    drawn: str = ""
    start_from: str = ""
    resume: bool = False
    tracker: str = ""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def __post_init__(self) -> None:
        from fedecider.evaluation.protocols import AUTO, get_protocol  # torch, which --help does without
        from fedecider.federation.aggregate import check_one_mean

        if not self.domain_names or len(set(self.domain_names)) != len(self.domain_names):
            raise ValueError(f"got domains {self.domains!r}, expected different names separated by commas")
        both = set(self.domain_names).intersection(self.public_names)
        if both or len(set(self.public_names)) != len(self.public_names):
            raise ValueError(
                f"got public_domains {self.public_domains!r} with domains {self.domains!r}, expected other names, each "
                "once"
            )
        _ = self.all_lora_settings, self.share_grid  # checks them
        if self.protocol != AUTO and get_protocol(self.protocol).num_sampled is not None:
            raise ValueError(
                f"got protocol {self.protocol!r}: beam search ranks the whole catalogue, expected auto, strict, "
                "strict/keep_seen, next_basket or last_month"
            )
        check_one_mean(self.secure_sum, self.robust_mean)
        if self.method in (LOCAL, COUNTS):
            object.__setattr__(self, "participation", 1.0)  # nobody is away from what it does by itself
        if self.method == LOCAL:
            object.__setattr__(self, "ensemble", self.ensemble.without_others)
        if self.method == COUNTS and (self.ensemble.kind == "none" or "others" not in self.ensemble.source_names):
            raise ValueError(
                f"got method {COUNTS} with ensemble.kind {self.ensemble.kind} and ensemble.sources "
                f"{self.ensemble.sources}, expected kind logit and sources with others: counts are all that it "
                "exchanges. Add --ensemble.kind logit --ensemble.sources own,public,others"
            )
        if self.resume and not self.output:
            raise ValueError("got resume without output, expected the folder of the run: --output runs/<name>")

    @property
    def recomputes_activations(self) -> bool:
        """Whether activations within a layer are recomputed in the backward pass, in the rounds and in stage 1: less
        memory, about a third more time. Whoever quantises the base lacks memory; peft does the same for such a base.
        """
        return self.quantize != "none"

    @property
    def lora_settings(self) -> LoraSettings:
        return self._with_targets(self.lora_targets)

    @property
    def all_lora_settings(self) -> list[LoraSettings]:
        """As given, and of each candidate."""
        others = (str(one.get("lora_targets", self.lora_targets)) for one in self.hyperparameter_candidates)
        return [self.lora_settings, *map(self._with_targets, others)]

    def _with_targets(self, targets: str) -> LoraSettings:
        names = (name.strip() for name in targets.split(","))
        return LoraSettings(self.lora_rank, tuple(name for name in names if name))

    @property
    def share_grid(self) -> list[float]:
        """Ascending; ``ValueError`` for anything but different numbers from 0 to 1."""
        try:
            scales = sorted(float(scale) for scale in self.update_scales.split(","))
        except ValueError:
            scales = []
        if not scales or len(set(scales)) != len(scales) or not all(0.0 <= scale <= 1.0 for scale in scales):
            raise ValueError(
                f"got update_scales {self.update_scales!r}, expected different numbers from 0 to 1, separated by commas"
            )
        return scales

    @property
    def domain_names(self) -> list[str]:
        return [name.strip() for name in self.domains.split(",") if name.strip()]

    @property
    def public_names(self) -> list[str]:
        return [name.strip() for name in self.public_domains.split(",") if name.strip()]


class Settings(NamedTuple):
    """All settings of one run, as the command line gives them."""

    run: RunConfig
    training: LocalTraining
    ranking: RankingConfig
    method: Any
    """The method's own frozen dataclass."""

    def as_record(self) -> dict[str, Any]:
        """By block, and ``package`` where an installed package brings the method."""
        from fedecider.methods import METHODS
        from fedecider.running.plain import as_plain

        blocks = {name: as_plain(value) for name, value in self._asdict().items()}
        return {**blocks, **METHODS.as_record(self.run.method)}
