"""Settings that every method of the cross-device track shares; one knob has one name everywhere."""

from __future__ import annotations

from fedecider.bounds import Epochs, NotNegative, OneOrMore, Positive, Width, dataclass
from fedecider.search_space import Real, Space, Whole


@dataclass(frozen=True)
class EmbeddingTraining:
    """Local training on implicit feedback with sampled negatives.

    Args:
        embedding_size: The width D of user and item embeddings.
        init_std: The standard deviation of the normal start values of embeddings.
        learning_rate: The learning rate of the user side: embeddings, score functions, adapters.
        item_learning_rate: The learning rate of the item tables; 0 takes learning_rate.
        local_epochs: The number of passes over a client's examples in a round.
        batch_size: The number of examples of a local step, positives and negatives together.
        num_negatives: The number of negatives that are drawn for each positive, anew in every round.
        weight_decay: The weight of the L2 term of every local step. Of item tables that are held by rows it reaches
            only the rows that the client touches in this round.
    """

    embedding_size: Width = 16
    init_std: NotNegative = 0.01
    learning_rate: Positive = 0.1
    item_learning_rate: NotNegative = 0.0
    local_epochs: Epochs = 10
    batch_size: OneOrMore = 256
    num_negatives: OneOrMore = 4
    weight_decay: NotNegative = 0.0

    @property
    def item_rate(self) -> float:
        """The learning rate of item tables."""
        return self.item_learning_rate or self.learning_rate


TRAINING_SPACE: Space = {
    "learning_rate": Real(0.001, 1.0, log=True),
    "init_std": Real(0.01, 1.0, log=True),
    "local_epochs": Whole(1, 10),
}
"""What a search may set of local training, for methods that train embeddings."""
