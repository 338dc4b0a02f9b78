"""The words of a text, without the libraries of models, which take seconds to import."""

from __future__ import annotations

import re
import unicodedata


def clean_words(text: str) -> list[str]:
    """The words of a text as IDs may use them: lower case, compatibility forms folded, letters and digits only."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())
