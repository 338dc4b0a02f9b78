"""A run of the cross-device track from its settings to its rounds: checks of settings that exclude each other and of
memory, blocks of clients.

Shape legend: N clients of the run, C clients of a block, U users (= clients).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from embedding_fr.attributes import attribute_digest, item_attributes
from embedding_fr.blocks import CPU_BLOCK_BYTES, Federation, Population, block_packer, build_population
from embedding_fr.config import EmbeddingTraining
from embedding_fr.local_only import local_only
from embedding_fr.methods import METHODS
from embedding_fr.server_memory import check_server_memory
from fedecider.bounds import NotNegative, OneOrMore, SecureThreshold, Seed, ShareAbove0, Threads, ZeroOrMore, dataclass
from fedecider.data.interactions import Interactions, InteractionsConfig
from fedecider.engine.run import Rounds
from fedecider.engine.run import train as train_rounds
from fedecider.evaluation.metrics import metrics_over_clients
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.aggregate import RobustMean, check_one_mean, with_robust_mean
from fedecider.federation.callbacks import RoundCallback
from fedecider.federation.channel import ONE_BY_ONE, AggregationBackend, Channel
from fedecider.federation.config import DevicePrivacyConfig
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.privacy import protect_upload
from fedecider.federation.processes import Processes
from fedecider.federation.rounds import Clients, RoundSettings, evaluate
from fedecider.federation.secure_rounds import SecureSums, securely_summed_rounds
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.running.machine import available_bytes
from fedecider.running.plain import as_plain
from fedecider.running.run_folder import RunFolder


@dataclass(frozen=True)
class EmbeddingRunConfig:
    """Further settings of a federated run.

    Args:
        method: The federated method.
        output: The output directory; if empty, one is made below runs/.
        seed: The seed from which every random draw of the run is derived.
        num_rounds: The number of rounds of local training and exchange.
        patience: Stops after patience / participation rounds without a better validation ndcg@10; 0 runs all rounds.
        participation: The share of the clients that take part in a round.
        secure_sum: If true, the server of a method that averages gets sums of masked uploads and no single one.
        secure_threshold: The share of a cohort whose uploads secure aggregation needs.
        secure_neighbours: The number of clients that each client shares masks with under secure_sum, an even number; 0
            stands for all of them.
        federation: If false, every client trains on from its own last upload, and nothing leaves it.
        protocol: The evaluation protocol: how recommendations are counted and where training negatives come from.
        eval_every: Every so many rounds, and after the last one, there is a validation; patience counts all rounds.
        num_eval_users: The number of users in the validation of every round, drawn once; 0 takes all. The test takes
            all.
        memory_gb: The memory for the work of one block of clients, and also the largest tensor of personal tables that
            is not kept in a memory-mapped file. With 0 blocks suit the caches, and tensors may take an eighth of the
            memory. Tables that the server keeps per client (FedEM, GPFedRec) are not covered. Results do not depend on
            it.
        num_threads: The number of CPU threads of a process; 0 leaves the choice to torch.
        checkpoint_every: A checkpoint is written every so many rounds, and after the last one.
        resume: If true, the stopped run in output goes on.
        robust_mean: The mean over clients, of methods whose server takes one: mean as it is; or median or trimmed_mean
            of every number, or norm_clip, a mean of changes bounded to their median size, against hostile uploads.
        tracker: The accelerate trackers that get settings, scores of the rounds and test results, separated by commas,
            such as tensorboard,mlflow; empty for none. They write into the output directory.
    """

    method: str = "fedmf"
    output: str = ""
    seed: Seed = 0
    num_rounds: OneOrMore = 100
    patience: ZeroOrMore = 0
    participation: ShareAbove0 = 1.0
    secure_sum: bool = False
    secure_threshold: SecureThreshold = 0.6
    secure_neighbours: ZeroOrMore = 16
    federation: bool = True
    protocol: str = "strict"
    eval_every: OneOrMore = 1
    num_eval_users: ZeroOrMore = 0
    memory_gb: NotNegative = 0.0
    num_threads: Threads = 0
    checkpoint_every: OneOrMore = 25
    resume: bool = False
    robust_mean: RobustMean = "mean"
    tracker: str = ""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"got method {self.method!r}, expected one of {', '.join(sorted(METHODS))}")
        get_protocol(self.protocol)
        if self.secure_neighbours % 2:
            raise ValueError(f"got secure_neighbours {self.secure_neighbours}, expected an even number, or 0 for all")
        if self.secure_sum and not self.federation:
            raise ValueError("got secure_sum with federation false, expected one of the two: nothing leaves a client")
        check_one_mean(self.secure_sum, self.robust_mean)
        if self.resume and not self.output:
            raise ValueError("got resume without output, expected the folder of the run: --output runs/<name>")


class EmbeddingSettings(NamedTuple):
    """All settings of one run, as the command line gives them."""

    run: EmbeddingRunConfig
    data: InteractionsConfig
    training: EmbeddingTraining
    privacy: DevicePrivacyConfig
    method: Any
    """The method's own frozen dataclass."""

    def as_record(self) -> dict[str, Any]:
        """By block, and ``package`` where an installed package brings the method."""
        blocks = {name: as_plain(value) for name, value in self._asdict().items()}
        return {**blocks, **METHODS.as_record(self.run.method)}


class Setup(NamedTuple):
    """A method, its clients in blocks, and how cohorts are packed."""

    method: FederatedMethod
    population: Population
    blocks: Sequence[Block]
    pack: Callable[[Sequence[int]], Sequence[Block]]
    validated: Sequence[Block]
    """Those that are scored after each round."""
    federation: Federation
    aggregation: AggregationBackend = ONE_BY_ONE
    """How uploads reach the server."""


def set_up(settings: EmbeddingSettings, interactions: Interactions, device: torch.device, protocol: str = "") -> Setup:
    """Everything but the rounds. ``protocol`` replaces the one of the settings, to count a trained state again."""
    run = settings.run
    keep_freed_memory()
    chosen = get_protocol(protocol or run.protocol)
    population = build_population(interactions.sequences, interactions.num_items, chosen, run.seed, device)
    client_bytes = working_set(settings, interactions.num_items, device)
    check_settings(settings, population)
    _check_memory(settings, population, client_bytes, device)
    federation = Federation(
        interactions.num_users, interactions.num_items, run.seed, chosen, device, table_bytes(run, device)
    )
    if METHODS[run.method].attributes:
        federation = federation._replace(attribute_IA=item_attributes(interactions, settings.method))
    method = build_method(settings, federation)
    check_shared_noise(settings, method)
    aggregation = ONE_BY_ONE
    if run.secure_sum:
        sums = SecureSums(run.seed, run.secure_threshold, run.secure_neighbours or None)
        aggregation = securely_summed_rounds(method, sums)
    pack = block_packer(population, client_bytes, block_bytes(run, device))
    blocks = pack(range(interactions.num_users))
    users = eval_users(run, interactions.num_users)
    return Setup(method, population, blocks, pack, pack(users) if users else blocks, federation, aggregation)


def hashes_of(settings: EmbeddingSettings, interactions: Interactions) -> dict[str, str]:
    """The hashes of all that a run reads: its data and, where its method has them, attributes of the items.

    Raises:
        ValueError: the method needs attributes and there are none.
    """
    hashes = {interactions.name: interactions.content_hash()}
    if METHODS[settings.run.method].attributes:
        hashes["attributes"] = attribute_digest(interactions, settings.method)
    return hashes


def build_method(settings: EmbeddingSettings, federation: Federation) -> FederatedMethod:
    """The method as it is set, in whatever part of the run: on one machine, at a server or at a site."""
    run = settings.run
    method = METHODS[run.method].build(federation, settings.training, settings.method)
    return with_robust_mean(method if run.federation else local_only(method, federation), run.robust_mean)


def working_set(settings: EmbeddingSettings, num_items: int, device: torch.device) -> Callable[[int], int]:
    """Train items of a client -> bytes that its part of a block takes, by which blocks are sized."""
    run, training, entry = settings.run, settings.training, METHODS[settings.run.method]
    whole_tables = entry.whole_tables + (0 if run.federation else 2)
    whole_tables += 0 if device.type == "cpu" else entry.passing_tables
    whole = run.secure_sum or settings.privacy.noise_scale > 0.0 or run.robust_mean != "mean"

    def client_bytes(num_train: int) -> int:
        if entry.client_bytes is not None:
            num_rows = num_items if whole else min(num_train, num_items)
            return entry.client_bytes(num_items, num_rows, training, settings.method)
        examples = num_train * (1 + training.num_negatives)
        rows = num_items if whole_tables else min(examples, num_items)
        per_example = 12 + training.embedding_size + 3 * training.local_epochs  # items and labels in each epoch's order
        floats = examples * per_example + rows * training.embedding_size * (4 + 2 * whole_tables)
        return 4 * floats

    return client_bytes


def eval_users(run: EmbeddingRunConfig, num_users: int) -> list[int]:
    """Users that are scored after each round, drawn once for the run and ascending; none of them means all."""
    if not 0 < run.num_eval_users < num_users:
        return []
    order = torch.randperm(num_users, generator=stream(run.seed, "eval_users"))
    return order[: run.num_eval_users].sort().values.tolist()


def keep_freed_memory() -> None:
    """Let temporaries of up to 32 MiB be reused instead of being mapped and cleared again in every local step.

    The C library of Linux decides that by the largest block it has freed so far (``man mallopt``), so one is taken and
    freed; nothing is written to it. It saves FedMF page faults in every local step.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def check_settings(settings: EmbeddingSettings, population: Population) -> None:
    """What would end the first round is told before anything is written."""
    run, entry = settings.run, METHODS[settings.run.method]
    num_pool = int(population.num_items - population.avoid_start_N.diff().max())
    if entry.negatives and settings.training.num_negatives > num_pool:
        raise ValueError(
            f"got num_negatives {settings.training.num_negatives}, expected at most {num_pool}: a client has no more "
            "items that may be negatives"
        )
    if not run.federation and entry.needs_server(settings.method):
        raise ValueError(
            f"got federation false with {run.method} as it is set, expected a method or a variant whose clients upload "
            "what they trained: nothing would be left of this one"
        )
    if entry.needs_everyone(settings.method) and run.participation < 1.0:
        raise ValueError(
            f"got secure with participation {run.participation}, expected 1: all clients exchange keys and shares"
        )


def check_shared_noise(settings: EmbeddingSettings, method: FederatedMethod) -> None:
    """``ValueError`` for noise on the sum where clients' shares of it do not add up in what the server sees."""
    run, privacy = settings.run, settings.privacy
    if privacy.noise_on == "upload" or privacy.noise_scale == 0.0 or not run.federation:
        return
    if run.robust_mean != "mean":
        raise ValueError(
            f"got noise_on sum with robust_mean {run.robust_mean}, expected mean: "
            "the shares of the noise add up in the plain sum over a whole cohort only"
        )
    if not method.takes_mean:
        raise ValueError(f"got noise_on sum with {run.method}, expected upload: its server reads every single upload")
    if not METHODS[run.method].equal_weights(settings.method):
        raise ValueError(
            f"got noise_on sum with {run.method} as it is set, expected upload, or a method whose clients weigh alike "
            "(fedmf with weighting uniform, pfedrec, fedrap): the noise would be scaled with a client's weight"
        )


def _check_memory(
    settings: EmbeddingSettings, population: Population, client_bytes: Callable[[int], int], device: torch.device
) -> None:
    """A typo should not end in the allocator: an item table, the user embeddings, the best round's copy of both, the
    largest client, who is alone in its block at best, and what the server holds for each client."""
    num_items, num_clients, entry = population.num_items, population.num_clients, METHODS[settings.run.method]
    tables = 8 * settings.training.embedding_size * (num_items + num_clients)
    each = entry.server_tables(settings.method) if settings.run.federation else 0
    server = 4 * each * settings.training.embedding_size * num_items * num_clients
    needed = tables + client_bytes(int(population.num_train_N.max())) + server + _held_bytes(settings, population)
    if entry.negatives and needed > device_bytes(device):  # the others have no embeddings
        given = {name: getattr(settings.training, name) for name in ("embedding_size", "local_epochs", "num_negatives")}
        what = ", ".join(f"{name} {value}" for name, value in given.items())
        held = f"; {server / 1e9:,.1f} GB are {each} item tables of every client at the server" if server else ""
        raise ValueError(
            f"got settings that take {needed / 1e9:,.1f} GB ({what}, {num_clients:,} users, {num_items:,} items{held})"
            f", expected at most the {device_bytes(device) / 1e9:,.1f} GB of this machine"
        )


def _held_bytes(settings: EmbeddingSettings, population: Population) -> int:
    """What a robust mean holds at once at least: the rows that every client sends, of one table."""
    if settings.run.robust_mean == "mean":
        return 0
    examples_N = population.num_train_N * (1 + settings.training.num_negatives)
    rows_N = examples_N.clamp(max=population.num_items)
    entry = METHODS[settings.run.method]
    whole = entry.whole_tables > 0
    num_rows = population.num_items * population.num_clients if whole else int(rows_N.sum())
    return 4 * settings.training.embedding_size * num_rows


def device_bytes(device: torch.device) -> int:
    """All memory of the machine, or of its accelerator."""
    if device.type == "cpu":
        return psutil.virtual_memory().total
    return torch.cuda.get_device_properties(device).total_memory


def block_bytes(run: EmbeddingRunConfig, device: torch.device) -> int:
    """Budget for the working set of a block: the caches of a CPU, a quarter of a GPU, at most ``memory_gb``."""
    suits = CPU_BLOCK_BYTES if device.type == "cpu" else device_bytes(device) // 4
    return min(suits, int(run.memory_gb * 1e9)) if run.memory_gb else suits


def table_bytes(run: EmbeddingRunConfig, device: torch.device) -> int:
    """Budget for one personal table of all clients; a run holds several, the best round's copy among them."""
    if run.memory_gb:
        return int(run.memory_gb * 1e9)
    if device.type == "cpu":
        return available_bytes() // 8
    return device_bytes(device) // 8


def rounds_of(
    settings: EmbeddingSettings,
    setup: Setup,
    processes: Processes,
    finish: Callable[[RunState, RunFolder], None] = lambda state, folder: None,
) -> Rounds:
    """The rounds of a run; each one, or each ``eval_every``-th, is scored on the validation items of all users
    together, or of those drawn for it."""
    run = settings.run

    def protect(upload, download, round, cohort_size):
        return protect_upload(upload, download, settings.privacy, run.seed, round, cohort_size)

    return Rounds(
        setup.method,
        Clients(
            setup.blocks,
            metrics_over_clients,
            pack=setup.pack,
            validated=setup.validated,
            summarise_logs=mean_logs,
        ),
        RoundSettings(run.num_rounds, run.seed, run.participation, patience=run.patience, eval_every=run.eval_every),
        Channel(protect, aggregation=setup.aggregation),
        processes,
        finish,
        checkpoint_every=run.checkpoint_every,
    )


def train(
    settings: EmbeddingSettings,
    setup: Setup,
    callbacks: Sequence[RoundCallback] = (),
) -> RunState:
    """All rounds in this process, with nothing written.

    Raises:
        ValueError: the server's memory does not suffice, told before the first round.
    """
    check_server_memory(settings.run.method, settings.method, setup.federation.num_items, lambda text: None)
    return train_rounds(rounds_of(settings, setup, Processes()), callbacks)


def mean_logs(logs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record for all clients of a cohort: how many they are, and the means of what they logged."""
    names = [name for name in logs[0] if name != "client"]
    return [{"clients": len(logs), **{name: sum(log[name] for log in logs) / len(logs) for name in names}}]


def user_positions(
    setup: Setup, state: RunState, variant: str, split: str, *, last: bool = False, processes: Processes | None = None
) -> Tensor:
    """(U,) positions under the best validation round, or the last one."""
    parameters = state.last if last else state.best
    return torch.cat(evaluate(setup.method, parameters, variant, split, setup.blocks, processes or Processes()))
