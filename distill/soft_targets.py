"""FedMD (Li and Wang, 2019, arXiv 1910.03581): companies whose models differ learn from the mean of their scores.

Every company scores the same public histories, ``p_c(i | h)``. Of its scores it sends the k best items of each history
with their log-probabilities; the rest of its probability is spread evenly over all other items. The consensus is
``q(i | h) = 1 / C sum_c p_c(i | h)``. A company digests it: it lowers ``- sum_i q(i | h) log p(i | h)``, its mean over
the public histories. Differs from the paper: probabilities in place of logits, since a model that ranks normalises
over its catalogue; the k best items in place of whole rows; cross-entropy in place of a difference of logits; and no
training on labels of the public set, of which there are none. No temperature: at .5 validation was no better.

Shape legend: H public histories, B of a batch, K items of a list, I items of the catalogue, C companies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idgen.backbones.family import TokenBatch, labels_of
from idgen.events import Draw, event_table, histories
from idgen.samples import Samples, item_segments, prompts_of, sample_batch, with_targets
from idgen.segments import lay_out
from idgen.tasks import Task, parents_of


class TopScores(NamedTuple):
    """What one company sends of its scores."""

    item_HK: Tensor
    """Numbers of items, each once in a row; -1 as padding."""
    log_prob_HK: Tensor
    """float64; what stands at padding does not count."""

    @property
    def known(self) -> Tensor:
        """(H, K) float64 probabilities, 0 at padding."""
        return self.log_prob_HK.exp() * (self.item_HK >= 0)

    def spread(self, rows: Tensor, num_items: int) -> Tensor:
        """(B, I) float64 probabilities of these histories: as they were sent, and of other items an even share each of
        what is left to 1."""
        item_BK, prob_BK = self.item_HK[rows], self.known[rows]
        num_others_B = num_items - (item_BK >= 0).sum(1)
        left_B = (1.0 - prob_BK.sum(1)).clamp(min=0.0) / num_others_B.clamp(min=1)
        prob_BI = left_B[:, None].repeat(1, num_items + 1)  # padding has the last column
        prob_BI = prob_BI.scatter(1, torch.where(item_BK < 0, num_items, item_BK), prob_BK)[:, :num_items]
        return prob_BI / prob_BI.sum(1, keepdim=True)


def consensus(lists: Sequence[TopScores], rows: Tensor, num_items: int) -> Tensor:
    """(B, I) float64: q of the public histories ``rows``."""
    return torch.stack([one.spread(rows, num_items) for one in lists]).mean(0)


def soft_batches(
    task: Task,
    sequences: Sequence[Sequence[int]],
    target: Callable[[Tensor], Tensor],
    batch_size: int,
    generator: torch.Generator,
) -> Iterator[TokenBatch]:
    """An epoch of public histories, each with an item drawn from ``target``, (B,) numbers of histories -> (B, I).

    The mean gradient of the drawn item's loss is that of the cross-entropy with the whole target. Where every ID ends
    with a token of its own, ``target_probs`` (B, I) of the batch, in the order of ``catalogue``, are that target itself
    (`idgen.losses.sequence_loss`).
    """
    rng = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    token_C = task.item_tokens() if task.trie.has_own_tokens else None
    nodes, config = parents_of([task]), task.config
    for rows in np.array_split(rng.permutation(len(sequences)), -(-len(sequences) // batch_size)):
        target_BI = target(torch.from_numpy(rows))
        drawn_B = torch.multinomial(target_BI, 1, generator=generator)[:, 0].tolist()
        events = event_table([[*sequences[row], item] for row, item in zip(rows, drawn_B, strict=True)], False)
        last_B = np.cumsum([len(sequences[row]) + 1 for row in rows]) - 1
        history_BH = histories(events, last_B, config.shown_history)
        prompts = prompts_of(task.parts, events, Draw(last_B, history_BH, np.zeros(len(rows), np.int64)))
        samples = Samples(prompts, item_segments(task.parts, events, last_B), np.ones(len(rows), bool))
        prompts = with_targets(samples) if config.is_row else prompts
        every = np.arange(len(rows))
        batch = sample_batch(task.parts, config, lay_out(task.parts, prompts), samples, prompts.task_B, every)
        if nodes is not None:
            batch |= nodes.batch(labels_of(batch), torch.from_numpy(prompts.task_B))
        if token_C is not None:
            batch |= {"catalogue": token_C, "target_probs": target_BI[:, task.trie.last_token_I.argsort()].float()}
        yield batch
