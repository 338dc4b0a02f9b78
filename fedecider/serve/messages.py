"""What goes in and out over HTTP, as OpenAPI shows it: the bodies of requests and answers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

from fedecider.models.answers import Repeats
from fedecider.serve.config import Limits

TITLE = "Burning Moon Investigations, Book 1: The Frozen Alibi"
DEFAULT_K = 10
TAGS = ("<title>", "<basket>")
"""Of the two kinds of entries of a history, as pydantic names them in errors."""


class Failure(BaseModel):
    """Why a request was not answered."""

    detail: Annotated[str, Field(description="One sentence: what was got, what was expected.")]


class Health(BaseModel):
    status: Annotated[str, Field(examples=["ok"])]
    needs_key: Annotated[bool, Field(description="Whether all else but the page asks for the API key.")]


class DomainInfo(BaseModel):
    name: Annotated[str, Field(examples=["crime"])]
    num_items: Annotated[int, Field(examples=[90])]
    ensemble: Annotated[bool, Field(description="Whether the private part of an ensemble ranks beside the model.")]


class Domains(BaseModel):
    domains: list[DomainInfo]
    max_history: Annotated[int, Field(description="The most titles of a history.", examples=[100])]
    max_k: Annotated[int, Field(description="The most recommendations of a request.", examples=[100])]


class Item(BaseModel):
    key: Annotated[str, Field(examples=["crime-0016"])]
    title: Annotated[str, Field(examples=[TITLE])]

    picture: Annotated[str | None, Field(description="Address of its picture, where the service has one.")] = None


class Items(BaseModel):
    items: Annotated[list[Item], Field(description="Best match first.")]


class SimilarItem(Item):
    score: Annotated[float, Field(description="Cosine of the vectors of both texts.", examples=[0.83])]


class SimilarItems(BaseModel):
    item: Annotated[Item, Field(description="The one that was asked about.")]
    items: Annotated[list[SimilarItem], Field(description="Nearest first.")]
    notes: list[str]


class AddedItems(BaseModel):
    num_added: Annotated[int, Field(examples=[1])]
    num_items: Annotated[int, Field(description="Of the domain, from now on until the service ends.", examples=[91])]


class RecommendedItem(Item):
    score: Annotated[
        float,
        Field(
            description="Log-probability: of the item's ID; with an ensemble, of the item.",
            examples=[-1.692],
        ),
    ]
    features: Annotated[
        dict[str, float],
        Field(
            description="What each feature adds to the item's score; empty without an ensemble.",
            examples=[{"model": 1.84, "counts": 0.41, "bought before": -0.27}],
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
        description="Titles or item keys of the domain, oldest first, or lists of those of one basket; none asks "
        "for what is popular.",
        examples=[[TITLE, "crime-0017"]],
    )
    basket = Annotated[list[title], Field(min_length=1, max_length=limits.max_history)]  # type: ignore[valid-type]
    kinds = Annotated[title, Tag(TAGS[0])] | Annotated[basket, Tag(TAGS[1])]
    entry = Annotated[kinds, Discriminator(lambda given: TAGS[isinstance(given, list)])]
    k = Field(default=min(DEFAULT_K, limits.max_k), ge=1, le=limits.max_k, description="The number of recommendations.")
    return create_model(
        "RecommendRequest",
        __config__=ConfigDict(extra="forbid", strict=True),
        domain=(str, Field(max_length=limits.max_title, examples=["crime"])),
        history=(list[entry], history),  # type: ignore[valid-type]
        k=(int, k),
        repeats=(
            Repeats,
            Field(
                default="learned",
                description="Items of the history: the weights decide (learned), they are left out (drop), or no "
                "others come (only).",
            ),
        ),
        exclude=(
            list[title] | None,  # type: ignore[valid-type]
            Field(default=None, description="Keys of items that are not recommended."),
        ),
        candidates=(
            list[title] | None,  # type: ignore[valid-type]
            Field(default=None, description="Keys of the items that alone may be recommended."),
        ),
        stock=(
            dict[title, float] | None,  # type: ignore[valid-type]
            Field(
                default=None,
                description="Key -> how many are left; items with none, or not named, are not recommended.",
            ),
        ),
    )


def new_items_class(limits: Limits) -> type[BaseModel]:
    """The body of POST /items."""
    strict = ConfigDict(extra="forbid", strict=True)
    word = (str, Field(min_length=1, max_length=limits.max_title))
    text = (str, Field(min_length=1, description="As the item table of the training says it."))
    one = create_model("NewItem", __config__=strict, key=word, title=word, text=text)
    items = (list[one], Field(min_length=1, max_length=limits.max_history))  # type: ignore[valid-type]
    return create_model("NewItems", __config__=strict, domain=word, items=items)
