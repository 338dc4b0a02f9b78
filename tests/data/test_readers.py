"""Each reader on small files in the original layout, malformed lines included; all values are worked out by hand."""

from __future__ import annotations

import pytest

from fedecider.data.readers import SOURCES, ReadOptions
from fedecider.data.readers.reading import DEFAULT_TEXT_FIELDS, clean, display_title, item_text

OPTIONS = ReadOptions()


def events_of(raw):
    """(user, item, time) in file order."""
    e = raw.events
    return [
        (e.users[u], e.items[i], t)
        for u, i, t in zip(e.user_E.tolist(), e.item_E.tolist(), e.time_E.tolist(), strict=True)
    ]


def goodreads_event(user, book, is_read=True, rating=0, date="Sat Nov 30 14:18:37 -0800 2013"):
    return {
        "user_id": user,
        "book_id": book,
        "review_id": "r",
        "is_read": is_read,
        "rating": rating,
        "review_text_incomplete": "",
        "date_added": date,
        "date_updated": date,
        "read_at": "",
        "started_at": "",
    }


def test_goodreads(write, tmp_path):
    write(
        "goodreads_interactions_mystery_thriller_crime.json.gz",
        [
            goodreads_event("u1", "11", rating=4, date="Thu Jan 01 00:00:10 +0000 1970"),
            goodreads_event("u1", "12", is_read=False, rating=0),
            '{"user_id": "u1", "book_id": "13", "is_read"',
            goodreads_event("u2", "12", is_read=False, rating=3),
            goodreads_event("u2", "11", is_read=True, rating=0, date="not a date"),
            {"user_id": "u3"},
        ],
    )
    book = {
        "book_id": "11",
        "title": "The <i>Red</i> Door (Vale, #2)",
        "title_without_series": "The Red Door",
        "authors": [{"author_id": "7", "role": ""}, {"author_id": "8", "role": "Translator"}],
        "series": ["900"],
        "popular_shelves": [{"count": "9", "name": "to-read"}, {"count": "4", "name": "cozy-mystery"}],
        "description": "A door;\nred &amp; locked",
        "publication_year": "1999",
    }
    write("goodreads_books_mystery_thriller_crime.json.gz", [book, {**book, "book_id": "99"}])
    write("goodreads_book_authors.json.gz", [{"author_id": "7", "name": "Ann Vale"}])
    write("goodreads_book_series.json.gz", [{"series_id": "900", "title": "Inspector Vale"}])

    raw = SOURCES["goodreads"](tmp_path, "crime", OPTIONS)
    assert events_of(raw) == [("u1", "11", 10), ("u2", "12", 1385849917)]
    assert raw.events.dropped.counts == {"neither read nor rated": {"events": 1}}
    assert raw.files[0].num_bad == 3
    places = [example.split(": ")[0] for example in raw.files[0].bad_lines]
    assert places == [f"goodreads_interactions_mystery_thriller_crime.json.gz:{line}" for line in (3, 5, 6)]
    catalogue = raw.read_catalogue({"11", "12"})
    assert sorted(catalogue.items) == ["11"]
    assert item_text(catalogue.items["11"], DEFAULT_TEXT_FIELDS, 500) == (
        "title: the red door (vale, #2); author: ann vale; series: inspector vale; shelves: cozy mystery; "
        "description: a door, red & locked"
    )
    # With a rating threshold, a book that is read but not rated is no feedback.
    rated = SOURCES["goodreads"](tmp_path, "crime", ReadOptions(min_rating=4))
    assert events_of(rated) == [("u1", "11", 10)]
    assert rated.events.dropped.counts["rating below min_rating"] == {"events": 1}


def test_goodreads_dates(write, tmp_path):
    dates = {  # the second and the third are 22:18:37 UTC
        "Thu Jan 01 00:00:00 +0000 1970": 0,
        "Sat Nov 30 14:18:37 -0800 2013": 1385849917,
        "Sun Dec 01 03:48:37 +0530 2013": 1385849917,
    }
    wrong = ["", "Sat Nov 31 14:18:37 -0800 2013", "Wed Dec 31 23:00:00 +0000 1969", "Sat Foo 30 1:1:1 -0800 2013"]
    write("goodreads_interactions_poetry.json", [goodreads_event("u", "1", date=date) for date in [*dates, *wrong]])
    write("goodreads_books_poetry.json", [{"book_id": "1", "title": "T"}])
    raw = SOURCES["goodreads"](tmp_path, "poetry", OPTIONS)
    assert [event[2] for event in events_of(raw)] == list(dates.values())
    assert [example.split(": ")[0][-1] for example in raw.files[0].bad_lines] == list("4567")


def review(user, asin, time, overall=5.0):
    return {"reviewerID": user, "asin": asin, "overall": overall, "unixReviewTime": time, "reviewText": "x"}


def test_amazon_2018(write, tmp_path):
    write("Gift_Cards_5.json.gz", [review("A", "B1", 200), review("A", "B2", 100, 2.0), "{bad", review("B", "B1", -5)])
    product = {
        "asin": "B1",
        "title": "Card &quot;One&quot;",
        "brand": "Visit Amazon's Acme Page",
        "category": ["Gift Cards", "Gift Cards", "Birthday"],
        "description": ["Nice <b>card</b>.", "", "Really."],
        "rank": "1,203 in Gift Cards (",
        "price": "$25.00",
    }
    write(
        "meta_Gift_Cards.json.gz",
        [product, product, {**product, "asin": "B2", "title": "var x=(new Date()).getTime()"}],
    )
    raw = SOURCES["amazon"](tmp_path, "gift_cards", OPTIONS)
    assert events_of(raw) == [("A", "B1", 200), ("A", "B2", 100)]
    assert raw.files[0].num_bad == 2
    assert raw.files[0].bad_lines[0] == "Gift_Cards_5.json.gz:3: no JSON object in '{bad'"
    assert raw.files[0].bad_lines[1].startswith("Gift_Cards_5.json.gz:4: no time in '{")
    catalogue = raw.read_catalogue({"B1", "B2"})
    assert (catalogue.num_same, catalogue.num_different) == (1, 0)
    assert catalogue.items["B1"] == {
        "title": 'Card "One"',
        "brand": "Acme",
        "categories": "Gift Cards, Birthday",
        "description": "Nice card. Really.",
        "price": "$25.00",
        "sales_rank": "1,203 in Gift Cards (",
    }
    assert catalogue.items["B2"]["title"] == ""
    liked = SOURCES["amazon"](tmp_path, "gift_cards", ReadOptions(min_rating=3))
    assert events_of(liked) == [("A", "B1", 200)]


def test_amazon_2014_literals(write, tmp_path):
    write("reviews_Cell_Phones_and_Accessories_5.json.gz", [review("A", "B1", 1)])
    write(
        "meta_Cell_Phones_and_Accessories.json.gz",
        [
            "{'asin': 'B1', 'title': \"Bob's case\", 'price': 9.99, 'salesRank': {'Phones': 12}, "
            "'categories': [['Phones', 'Cases'], ['Phones', 'Gifts']], 'brand': 'by Acme', 'description': 'Fits.'}",
            "{'asin': 'B2', 'title': __import__('os')}",
            "['B3']",
        ],
    )
    raw = SOURCES["amazon"](tmp_path, "phones", OPTIONS)
    catalogue = raw.read_catalogue({"B1", "B2", "B3"})
    assert raw.files[1].num_bad == 2
    assert list(catalogue.items) == ["B1"]
    text = item_text(catalogue.items["B1"], ("title", "brand", "categories", "price", "sales_rank"), 500)
    assert (
        text == "title: bob's case; brand: acme; categories: phones, cases, gifts; price: 9.99; sales rank: phones: 12"
    )


def test_movielens_100k(write, tmp_path):
    write("u.data.gz", ["196\t242\t3\t881250949", "186\t302\tthree\t891717742", "196\t302\t5\t881250000"])
    flags = "|".join("1" if place in (5, 17) else "0" for place in range(19))
    write("u.item.gz", [f"242|Mis\u00e9rables, Les (1995)|01-Jan-1995||http://x|{flags}", "302|short"], "latin-1")
    raw = SOURCES["movielens"](tmp_path, "films", OPTIONS)
    assert events_of(raw) == [("films-196", "242", 881250949), ("films-196", "302", 881250000)]
    assert raw.files[0].bad_lines[0].startswith("u.data.gz:2: ")
    catalogue = raw.read_catalogue({"242", "302"})
    assert catalogue.items == {"242": {"title": "Mis\u00e9rables, Les (1995)", "genres": "Comedy, War"}}
    assert raw.files[1].num_bad == 1


def test_movielens_1m_and_its_ordered_rebuild(write, tmp_path):
    write("movies.dat", ["1::Toy Story (1995)::Animation|Children's", "2::L\u00e9on (1994)::Drama"], "latin-1")
    write("ratings_ordered.csv.gz", ["user,movie,rating,order", "1,2,5,0", "1,1,4,7"])
    raw = SOURCES["movielens"](tmp_path, "films", OPTIONS)
    assert events_of(raw) == [("films-1", "2", -1), ("films-1", "1", -1)]
    assert raw.events.order_E.tolist() == [0, 7]
    # The original file is preferred as soon as it is there.
    write("ratings.dat", ["1::1::5::978300760", "1:1:5:978300760"])
    raw = SOURCES["movielens"](tmp_path, "films", OPTIONS)
    assert events_of(raw) == [("films-1", "1", 978300760)]
    assert raw.events.order_E is None
    assert raw.files[0].num_bad == 1
    assert raw.read_catalogue({"2"}).items == {"2": {"title": "L\u00e9on (1994)", "genres": "Drama"}}


def test_movielens_csv(write, tmp_path):
    write("ratings.csv", ["userId,movieId,rating,timestamp", "1,31,2.5,1260759144", "1,31", "1,32,4.0,1260759145"])
    write(
        "movies.csv", ["movieId,title,genres", '31,"Net, The (1995)",Action|Crime', "32,Nil (2000),(no genres listed)"]
    )
    raw = SOURCES["movielens"](tmp_path, "films", ReadOptions(min_rating=3))
    assert events_of(raw) == [("films-1", "32", 1260759145)]
    assert raw.files[0].bad_lines == ["ratings.csv:3: not 4 columns in '1,31'"]
    items = raw.read_catalogue({"31", "32"}).items
    assert items["31"] == {"title": "Net, The (1995)", "genres": "Action, Crime"}
    assert items["32"]["genres"] == ""


def test_goodbooks(write, tmp_path):
    write("ratings.csv.gz", ["user_id,book_id,rating", "9,2,5", "9,1,4", "x,1,4"])
    write(
        "books.csv.gz",
        [
            "book_id,goodreads_book_id,authors,original_publication_year,original_title,title",
            '1,2767052,Suzanne Collins,2008.0,The Hunger Games,"The Hunger Games (The Hunger Games, #1)"',
            '2,3,"J.K. Rowling, Mary Grandpr\u00e9",,,Harry Potter',
        ],
    )
    write("tags.csv.gz", ["tag_id,tag_name", "1,to-read", "2,young-adult", "3,dystopia"])
    write("book_tags.csv", ["goodreads_book_id,tag_id,count", "2767052,1,900", "2767052,3,20", "2767052,2,70"])
    raw = SOURCES["goodbooks"](tmp_path, "books", OPTIONS)
    assert events_of(raw) == [("books-9", "2", -1), ("books-9", "1", -1)]
    items = raw.read_catalogue({"1", "2"}).items
    assert items["1"]["shelves"] == "young adult, dystopia"
    assert items["1"]["year"] == "2008"
    assert items["2"] == {
        "title": "Harry Potter",
        "author": "J.K. Rowling, Mary Grandpr\u00e9",
        "year": "",
        "shelves": "",
    }


def test_packed_interactions(write, tmp_path):
    write(
        "items.jsonl.gz",
        [
            {"domain": "games", "item": 0, "asin": "B7", "title": "Chess"},
            {"domain": "games", "item": 1, "asin": "", "title": "", "keywords": "dice set"},
            {"domain": "films", "item": 0, "asin": "B9", "title": "Alien"},
        ],
    )
    write(
        "interactions.csv.gz",
        [
            "domain,user,pos,item,rating,timestamp",
            "films,u,0,0,5,100",
            "games,u,1,1,,",
            "games,u,0,0,4,1514160000",
            "games,,0,0,4,5",
        ],
    )
    raw = SOURCES["packed"](tmp_path, "games", OPTIONS)
    assert events_of(raw) == [("u", "games:1", -1), ("u", "B7", 1514160000)]
    assert raw.events.order_E.tolist() == [1, 0]
    assert raw.files[0].bad_lines == ["interactions.csv.gz:5: no user in 'games,,0,0,4,5'"]
    items = raw.read_catalogue({"games:1"}).items
    assert display_title(items["games:1"]) == "dice set"
    with pytest.raises(ValueError, match="min_rating"):
        SOURCES["packed"](tmp_path, "games", ReadOptions(min_rating=3))


def test_packed_sequences(write, tmp_path):
    write(
        "items.jsonl",
        [{"domain": "toys", "item": i, "title": f"T{i}", "categories": ["Toys", "Dolls"]} for i in (1, 2, 3)],
    )
    write("sequences.tsv", ["domain\tuser\titems", "toys\ta\t3 1", "other\ta\t9", "toys\tb\t2 x", "toys\ta\t2"])
    raw = SOURCES["packed"](tmp_path, "toys", OPTIONS)
    assert [event[:2] for event in events_of(raw)] == [("a", "toys:3"), ("a", "toys:1"), ("a", "toys:2")]
    assert raw.events.order_E.tolist() == sorted(raw.events.order_E.tolist())
    assert raw.files[0].num_bad == 1
    assert raw.read_catalogue({"toys:1"}).items["toys:1"]["categories"] == "Toys, Dolls"


def test_clean_and_item_text():
    assert clean(" a\n<b>b</b>\tc &amp; d ") == "a b c & d"
    assert clean("one<br/>two<p>three</p><A HREF='x'>four</A>.") == "one two three four."
    assert clean("if a < b and c > d") == "if a < b and c > d"
    assert clean(["x", "y", "x", None]) == "x, y"
    assert clean("<script>evil()</script>ok") == "ok"
    fields = {"title": "A; B", "description": "one two three", "price": "3"}
    assert item_text(fields, ("title", "brand", "description"), 9) == "title: a, b; description: one two"
    assert item_text({}, ("title",), 9) == ""
