"""The methods of a track by name: those of this package, and those that installed packages add by an entry point."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol, TypeVar, cast

LLM_METHODS = "fedecider.methods"
"""The entry point group of the cross-silo track."""
EMBEDDING_METHODS = "fedecider.embedding_methods"
"""The entry point group of the cross-device track. There is a group for each track, so that the track of a method is
known before its module is imported: the cross-device track starts without the libraries of language models, which take
seconds."""
ID_METHODS = "fedecider.id_methods"
"""The entry point group of ID-based methods."""
TRACKS = {
    LLM_METHODS: "the cross-silo track",
    EMBEDDING_METHODS: "the cross-device track",
    ID_METHODS: "the track of ID-based methods",
}


RESERVED = ("config", "help", "print_config")
"""Options that every command has, and that no method can be called after."""


class HasConfig(Protocol):
    """What an entry of either track has."""

    @property
    def config(self) -> type: ...


Entry = TypeVar("Entry", bound=HasConfig)


class Package(NamedTuple):
    """An installed distribution."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Registry(Mapping[str, Entry]):
    """Method name -> entry, the built-in ones first, then those of other packages in the order of their names.

    Installed packages are searched once, when a name is first asked for. A method's module, also a built-in one's, is
    imported when its entry is read. A name that cannot be used stays in the mapping; reading its entry raises
    ``ValueError`` with the reason. So one bad package does not take the other methods away.
    """

    def __init__(self, group: str, kind: str, built_in: Mapping[str, str]):
        self.group, self.built_in = group, built_in
        self._kind = kind
        self.own: dict[str, Entry] = {}
        """Entries that this process was given as objects."""
        self._loaded: dict[str, Entry | str] = {}

    @property
    def kind(self) -> type[Entry]:
        """What an entry is an instance of; it is imported when it is first asked for."""
        return cast("type[Entry]", resolve_name(self._kind))

    @property
    def _outside(self) -> dict[str, list[EntryPoint]]:
        return outside_methods(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.built_in, *self.own, *self._outside]))

    def __len__(self) -> int:
        return len({*self.built_in, *self.own, *self._outside})

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.own or name in self._outside

    def __getitem__(self, name: str) -> Entry:
        if name in self.own:
            return self.own[name]
        if name not in self._outside:
            return cast(Entry, resolve_name(self.built_in[name]))
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        found = self._loaded[name]
        if isinstance(found, str):
            raise ValueError(found)
        return found

    @contextmanager
    def with_own(self, name: str, entry: Entry) -> Iterator[None]:
        """Have ``entry`` among the methods while the block lasts."""
        self.own[name] = entry
        try:
            yield
        finally:
            del self.own[name]

    def problem(self, name: str) -> str:
        """Why the method cannot be used, in one sentence; empty where it can."""
        try:
            self[name]
        except ValueError as error:
            return str(error)
        return ""

    @property
    def outside(self) -> list[str]:
        """Names that installed packages bring, whether they can be used or not."""
        return list(self._outside)

    def package(self, name: str) -> Package | None:
        """The package that brings the method; None for a built-in one."""
        return package_of(self._outside[name][0]) if name in self._outside else None

    def as_record(self, name: str) -> dict[str, dict[str, str]]:
        """What the record of a run says of a method from outside: ``package`` with ``name`` and ``version``."""
        package = self.package(name)
        return {"package": package._asdict()} if package else {}

    def check_recorded(self, config: Mapping[str, Any], source: str, exact: bool = False) -> None:
        """Refuse settings of a record whose method comes from a package that is not installed here.

        Raises:
            ValueError: it is absent, or not the recorded version and ``exact`` is true; ``source`` is named.
        """
        run, package = config.get("run"), config.get("package")
        name = run.get("method") if isinstance(run, dict) else None
        if not isinstance(name, str) or not isinstance(package, dict):
            return
        wanted, found = Package(str(package.get("name")), str(package.get("version"))), self.package(name)
        if found is None or (exact and found != wanted):
            raise ValueError(
                f"got the method {name} of {wanted} in {source}, expected that package to be installed here, where "
                f"there is {found or 'none'}. Run: pip install '{wanted.name}=={wanted.version}'"
            )

    def _load(self, name: str) -> Entry | str:
        """The entry, or why it cannot be used."""
        points = self._outside[name]
        refusal = self._refused_name(name, points)
        if refusal:
            return refusal
        (point,) = points
        package = package_of(point)
        try:
            found = point.load()
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return (
                f"got the method {name} of {package}, which cannot be imported ({reason}), expected {point.value} to "
                f"be a {self._expected}. Repair or uninstall {package.name}"
            )
        if not isinstance(found, self.kind) or not is_dataclass(found.config):
            kind = type(found)
            what = "has no dataclass of settings" if isinstance(found, self.kind) else _is_a(kind)
            return (
                f"got the method {name} of {package}, where {point.value} {what}, expected a {self._expected}. "
                f"Repair or uninstall {package.name}"
            )
        return cast(Entry, found)

    @property
    def _expected(self) -> str:
        return self._kind.replace(":", ".")

    def _refused_name(self, name: str, points: list[EntryPoint]) -> str:
        if name in self.built_in:
            return of_fedecider(name, points[0])
        if len(points) > 1:
            first, second = points[:2]
            tracks = [f" ({TRACKS[one.group]})" if first.group != second.group else "" for one in (first, second)]
            return (
                f"got the method {name} from {package_of(first)}{tracks[0]} and from {package_of(second)}{tracks[1]}, "
                "expected different names. Uninstall one of them, or rename its method"
            )
        if not may_be_name(name):
            return (
                f"got the method {name!r} of {package_of(points[0])}, expected a name of small letters, digits and _ "
                f"that is none of {', '.join(RESERVED)}: options and blocks of settings are called after it"
            )
        return ""


def may_be_name(name: str) -> bool:
    """Whether options and blocks of settings can be called after a method of this name."""
    return re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None and name not in RESERVED


def _is_a(kind: type) -> str:
    return f"is of the type {kind.__module__}.{kind.__qualname__}"


@cache
def outside_methods(group: str) -> dict[str, list[EntryPoint]]:
    """Name of each method that an installed package brings to a track -> its entry points, those of both tracks."""
    found = [one for track in TRACKS for one in sorted(entry_points(group=track))]
    names = sorted({one.name for one in found if one.group == group})
    return {name: [one for one in found if one.name == name] for name in names}


def of_fedecider(name: str, point: EntryPoint) -> str:
    """What is told where a package brings a method under the name of a built-in one."""
    package = package_of(point)
    return (
        f"got the method {name} from {package} and from fedecider itself, expected different names. Uninstall "
        f"{package.name}, or rename its method"
    )


def package_of(point: EntryPoint) -> Package:
    """The distribution that declares an entry point."""
    dist = point.dist
    return Package(dist.metadata["Name"], dist.version) if dist is not None else Package("an unknown package", "?")
