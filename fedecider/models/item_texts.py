"""Item texts as vectors of a text encoder: encoded once, kept in the cache, the same for every stage and baseline.

Shape legend: I items, E width of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.data.domain import Domain, by_catalogue
from fedecider.data.encoders import chosen_encoder, load_encoder
from fedecider.running.run_folder import cached_stage, check_tensors, damage_names, file_digest
from idgen.text_vectors import TextProjection

VECTOR_FILE = "vectors.safetensors"
PROJECTION_FILE = "text_projection.safetensors"
MEAN = "mean."


TEXT_ENCODER = "text encoder"
"""Its digest's name among the hashes of data; no domain is called so."""


def encoder_digest(name: str) -> str:
    """What decides the vectors: the content of a local folder, else the encoder's name, ``auto`` being resolved."""
    chosen = chosen_encoder(name)
    return file_digest(Path(chosen)) if Path(chosen).is_dir() else chosen


def encoded_texts(domains: Mapping[str, Domain], encoder: str, cache: str) -> dict[str, Tensor]:
    """Domain -> (I, E) float32 vectors of its published item texts; all catalogues are encoded once, in one call."""
    texts = {name: domain.item_texts for name, domain in by_catalogue(domains).items()}

    def build(folder: Path) -> None:
        vector_IE = load_encoder(encoder).encode([text for of_domain in texts.values() for text in of_domain])
        parts = vector_IE.float().split([len(of_domain) for of_domain in texts.values()])
        save_file({name: part.contiguous() for name, part in zip(texts, parts, strict=True)}, folder / VECTOR_FILE)

    stage = cached_stage(Path(cache), "text-vectors", {"encoder": encoder_digest(encoder), "texts": texts}, build)
    with damage_names(stage.folder / VECTOR_FILE):
        loaded = load_file(stage.folder / VECTOR_FILE)
        return {name: loaded[domain.catalogue] for name, domain in domains.items()}


def save_projection(path: Path, projection: TextProjection, encoder: str) -> None:
    """What gives texts that come later their place among the item vectors; ``encoder``: its `encoder_digest`."""
    tensors = {f"{MEAN}{name}": mean_E for name, mean_E in projection.mean.items()}
    save_file({**tensors, "basis": projection.basis_ED.contiguous()}, path, metadata={"encoder": encoder})


def load_projection(path: Path) -> tuple[TextProjection, str]:
    """The projection of `save_projection`, and the digest of its encoder. ``ValueError`` when the file is damaged."""
    check_tensors(path)
    with damage_names(path), safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
        mean = {name.removeprefix(MEAN): tensor for name, tensor in tensors.items() if name.startswith(MEAN)}
        return TextProjection(mean, tensors["basis"]), file.metadata()["encoder"]
