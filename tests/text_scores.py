"""Text neighbours and their sum with counts as whole tables of scores, against which the rows of runs are held."""

from fedecider.baselines.counts import (
    NUM_CONTEXT,
    TEXT_WEIGHT,
    cooccurrence_scores,
    newest_weights,
    text_votes,
    voted,
)
from fedecider.data.near_texts import nearest_texts, unit_vectors


def text_neighbour_scores(vector_ID, sequences, split, num_context=NUM_CONTEXT):
    votes = text_votes(nearest_texts(unit_vectors(vector_ID.numpy())))
    return lambda user_B: voted(newest_weights(sequences, user_B, split, len(vector_ID), num_context), votes).dense()


def text_and_count_scores(vector_ID, sequences, split, extra=(), text_weight=TEXT_WEIGHT):
    text, asked = text_neighbour_scores(vector_ID, sequences, split), (sequences, len(vector_ID), split, extra)
    counts = cooccurrence_scores(*asked, window=None, directed=False, num_context=NUM_CONTEXT)
    return lambda user_B: counts(user_B) + text_weight * text(user_B)
