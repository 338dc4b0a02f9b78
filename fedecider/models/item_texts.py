"""Item texts as vectors of a text encoder: encoded once, kept in the cache, the same for every stage and baseline.

A text is known by its SHA-256. Where a catalogue has grown, the new texts alone are encoded; TF-IDF, which is fitted on
all texts, starts anew.

Shape legend: I items, E width of the encoder, N texts, M texts that are kept.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.data.encoders import chosen_encoder, encoder_label, is_fitted, load_encoder
from fedecider.data.sellers import by_catalogue
from fedecider.running.damage import check_tensors, damage_names
from fedecider.running.plain import content_key
from fedecider.running.progress import progress, stage
from fedecider.running.stages import cached_stage, file_digest
from fedecider.scratch import aside
from idgen.semantic_ids import Codebook
from idgen.text_vectors import TextProjection

VECTOR_FILE = "vectors.safetensors"
PROJECTION_FILE = "text_projection.safetensors"
CODEBOOK_FILE = "codebook.safetensors"
MEAN = "mean."


TEXT_ENCODER = "text encoder"
"""Its digest's name among the hashes of data; no domain is called so."""


def encoder_digest(name: str) -> str:
    """What decides the vectors: the content of a local folder, else the encoder's name, ``auto`` being resolved."""
    chosen = chosen_encoder(name)
    return file_digest(Path(chosen)) if Path(chosen).is_dir() else chosen


def encoded_catalogues(domains: Mapping[str, Domain], encoder: str, cache: str) -> dict[str, Tensor]:
    """Catalogue -> (I, E) float32 vectors of its published item texts; all are encoded once, in one call."""
    texts = {name: sellers.catalogue.texts for name, sellers in by_catalogue(domains).items()}

    def build(folder: Path) -> None:
        vector_IE = _encoded([text for of_one in texts.values() for text in of_one], encoder, Path(cache))
        parts = vector_IE.split([len(of_one) for of_one in texts.values()])
        save_file({name: part.contiguous() for name, part in zip(texts, parts, strict=True)}, folder / VECTOR_FILE)

    with stage("texts"):
        kept = cached_stage(Path(cache), "text-vectors", {"encoder": encoder_digest(encoder), "texts": texts}, build)
    with damage_names(kept.folder / VECTOR_FILE):
        vectors = load_file(kept.folder / VECTOR_FILE)
        return {name: vectors[name] for name in texts}  # in the order of the clients, which sums over all keep


def encoded_texts(domains: Mapping[str, Domain], encoder: str, cache: str) -> dict[str, Tensor]:
    """Domain -> (I, E) vectors of what it sells: rows of those of its catalogue."""
    vectors = encoded_catalogues(domains, encoder, cache)
    return {name: rows_of(vectors[domain.catalogue.name], domain) for name, domain in domains.items()}


def rows_of(vector_ID: Tensor, domain: Domain) -> Tensor:
    """Of (I, D) vectors of a catalogue those of the items that ``domain`` sells; all of them are not copied."""
    return vector_ID if not domain.is_part else vector_ID[torch.from_numpy(domain.catalogue_number_I)]


def _encoded(texts: Sequence[str], encoder: str, cache: Path) -> Tensor:
    """(N, E) float32; what was encoded before is read. The last bits of a vector depend on the batch that it was in."""
    if is_fitted(encoder):
        return load_encoder(encoder).encode(texts).float()
    folder = cache / f"texts-{content_key(encoder_digest(encoder))}"
    row_of, vector_ME = _known(folder)
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    new = [number for number, digest in enumerate(digests) if digest not in row_of]
    if new:
        with progress(f"text vectors of {encoder_label(encoder)}", os.environ.get("RANK", "0") == "0") as told:
            vector_NE = load_encoder(encoder).encode([texts[number] for number in new], told).float()
        for row, number in enumerate(new):  # of equal texts the first one counts
            row_of.setdefault(digests[number], len(vector_ME) + row)
        _keep(folder, [digests[number] for number in new], vector_NE)
        vector_ME = torch.cat([vector_ME, vector_NE]) if len(vector_ME) else vector_NE
    return vector_ME[[row_of[digest] for digest in digests]]


def _known(folder: Path) -> tuple[dict[bytes, int], Tensor]:
    """Digest -> row of the (M, E) vectors in the files of ``folder``."""
    row_of: dict[bytes, int] = {}
    parts: list[Tensor] = []
    for path in sorted(folder.glob("*.safetensors")):
        check_tensors(path)
        with damage_names(path):
            block, before = load_file(path), sum(map(len, parts))
            row_of |= {bytes(row): before + number for number, row in enumerate(block["digest"].numpy())}
            parts.append(block["vector"])
    return row_of, torch.cat(parts) if parts else torch.zeros(0, 0)


def _keep(folder: Path, digests: Sequence[bytes], vector_NE: Tensor) -> None:
    """One file more; nothing half-written ever has its name."""
    folder.mkdir(parents=True, exist_ok=True)
    first: dict[bytes, int] = {}
    for number, digest in enumerate(digests):
        first.setdefault(digest, number)
    digest_N = torch.frombuffer(bytearray(b"".join(first)), dtype=torch.uint8).view(-1, 32)
    tensors = {"digest": digest_N, "vector": vector_NE[list(first.values())].contiguous()}
    with aside(folder / f"{uuid.uuid4().hex}.safetensors") as scratch:
        save_file(tensors, scratch)


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


def save_codebook(path: Path, codebook: Codebook, encoder: str) -> None:
    """What gives texts that come later their semantic IDs; ``encoder``: its `encoder_digest`."""
    levels = {str(number): rows_CE for number, rows_CE in enumerate(codebook.centroids)}
    save_file(levels, path, metadata={"encoder": encoder})


def load_codebook(path: Path) -> tuple[Codebook, str]:
    """The codebook of `save_codebook`, and the digest of its encoder. ``ValueError`` when the file is damaged."""
    check_tensors(path)
    with damage_names(path), safe_open(path, "pt") as file:
        levels = range(len(file.keys()))
        return Codebook([file.get_tensor(str(number)) for number in levels]), file.metadata()["encoder"]
