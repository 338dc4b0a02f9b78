"""What goes in and out, as OpenAPI shows it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, create_model

from fedecider.serve.config import Limits

TITLE = "Burning Moon Investigations, Book 1: The Frozen Alibi"
DEFAULT_K = 10


class Failure(BaseModel):
    """Why a request was not answered."""

    detail: Annotated[str, Field(description="One sentence: what was got, what was expected.")]


class Health(BaseModel):
    status: Annotated[str, Field(examples=["ok"])]
    needs_key: Annotated[bool, Field(description="Whether all else but the page asks for the API key.")]


class DomainInfo(BaseModel):
    name: Annotated[str, Field(examples=["crime"])]
    num_items: Annotated[int, Field(examples=[90])]
    memory: Annotated[bool, Field(description="Whether a private memory ranks beside the model.")]


class Domains(BaseModel):
    domains: list[DomainInfo]
    max_history: Annotated[int, Field(description="The most titles of a history.", examples=[100])]
    max_k: Annotated[int, Field(description="The most recommendations of a request.", examples=[100])]


class Item(BaseModel):
    key: Annotated[str, Field(examples=["crime-0016"])]
    title: Annotated[str, Field(examples=[TITLE])]


class Items(BaseModel):
    items: Annotated[list[Item], Field(description="Best match first.")]


class RecommendedItem(Item):
    score: Annotated[
        float,
        Field(
            description="Log-probability: of the item's ID, over length ** length_penalty; with a memory, of the item.",
            examples=[-1.692],
        ),
    ]
    expert_shares: Annotated[
        dict[str, float],
        Field(
            description="Of the item's probability, the share from each expert; empty without a memory.",
            examples=[{"counts": 0.41, "text": 0.32, "model": 0.27}],
        ),
    ]


class Recommendations(BaseModel):
    domain: Annotated[str, Field(examples=["crime"])]
    history: Annotated[list[Item], Field(description="The items that the request named, oldest first.")]
    items: Annotated[list[RecommendedItem], Field(description="Best first.")]
    alpha_shares: Annotated[
        dict[str, float],
        Field(
            description="Each client's share of the absolute fusion weights; empty for methods without.",
            examples=[{"crime": 0.5, "comics": 0.3, "children": 0.2}],
        ),
    ]
    notes: Annotated[list[str], Field(description="What somebody who reads the answer should know.", examples=[[]])]


def request_class(limits: Limits) -> type[BaseModel]:
    """The body of POST /recommend, with the bounds of this service."""
    title = Annotated[str, Field(min_length=1, max_length=limits.max_title)]
    history = Field(
        max_length=limits.max_history,
        description="Titles or item keys of the domain, oldest first; none asks for what is popular.",
        examples=[[TITLE, "crime-0017"]],
    )
    k = Field(default=min(DEFAULT_K, limits.max_k), ge=1, le=limits.max_k, description="The number of recommendations.")
    return create_model(
        "RecommendRequest",
        __config__=ConfigDict(extra="forbid", strict=True),
        domain=(str, Field(max_length=limits.max_title, examples=["crime"])),
        history=(list[title], history),  # type: ignore[valid-type]
        k=(int, k),
        exclude_seen=(bool, Field(default=True, description="Whether the history's items are left out.")),
    )
