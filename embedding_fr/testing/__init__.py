"""Tests for methods of the cross-device track that live outside this package: contract, tiny users, slow loops."""

from __future__ import annotations

from embedding_fr.testing.contract import EMBEDDING_CONTRACT, EmbeddingBench, check_reference

__all__ = ["EMBEDDING_CONTRACT", "EmbeddingBench", "check_reference"]
