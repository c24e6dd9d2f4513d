"""Send the user's own Python packages to machines that may not have them.

A package is *installed* if it is in a site-packages folder, or if pip has recorded it in its folder; every machine
imports its own copy of it. All others are the user's own: beside the script, on PYTHONPATH, in an editable install. The
head lists those that pickled code names (`collect`). A node compares the list with what it can import (`compare`) and
requests the files that it lacks; its workers import them from memory (`pack`, `install`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import itertools
import os
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

_EVERYWHERE = frozenset(
    {"__main__", "__mp_main__", "clusterenv", "cloudpickle", "gymnasium", "msgspec", "numpy", "zmq"}
)
"""Never sent: packages that a node has already imported, and the script, which is pickled by value."""

_MAX_ENTRIES = 20_000  # directory entries per package

_MAX_BYTES = 16 << 20  # total size of the Python files of one package

_STDLIB = Path(os.__file__).resolve().parent

_NAME = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*(?::[\w./-]+)?")
_IMPORTS = re.compile(
    rb"^[ \t]*from[ \t]+([A-Za-z_]\w*)[\w.]*[ \t]+import\b"
    rb"|^[ \t]*import[ \t]+([A-Za-z_][^\n#;]*)"
    rb"|import_module\([ \t]*[\"']([A-Za-z_]\w*)"
    rb"|[\"']([A-Za-z_]\w*)(?:\.\w+)*:[\w./-]+[\"']",  # an entry point, or an id with its module
    re.MULTILINE,
)


class Wanted(NamedTuple):
    """A package of the head."""

    name: str
    fingerprint: str  # of its Python files; empty if there are too many
    folder: str  # its parent folder on the head


class File(NamedTuple):
    module: str
    is_package: bool
    path: str  # empty: a namespace package, which has no file
    source: bytes


class Package(NamedTuple):
    """One of the user's own packages, with its files as they were when they were read."""

    wanted: Wanted
    files: tuple[File, ...]
    unsendable: str  # why its files cannot be sent; empty if they can


class Comparison(NamedTuple):
    """Which of the wanted packages a machine has."""

    folders: dict[str, str]  # packages that it has outside of Python's path, and their folders
    lacking: tuple[str, ...]  # packages that it does not have, or has with different files


# -- on the head --------------------------------------------------------------------------------------------------


def collect(words: Iterable[str], known: Collection[str] = ()) -> tuple[Package, ...]:
    """Return the user's own packages that these strings name, and those that they import, except those `known`.

    A string that only looks like a module's name does no harm.
    """
    might_be = _Candidates()
    todo = {match[1] for match in map(_NAME.fullmatch, words) if match and might_be(match[1])}
    seen, found = set(known), []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        package = find_own(name)
        if package is not None:
            found.append(package)
            todo.update(imported for file in package.files for imported in _imports(file.source))
    return tuple(sorted(found))


def find_own(name: str) -> Package | None:
    """Return the top-level package or module of this name if it is the user's own."""
    if name in sys.stdlib_module_names or name in _EVERYWHERE:
        return None
    spec = _find_spec(name)
    folder = _folder(spec)
    if spec is None or folder is None or _is_for_packages(folder) or name in _installed_in(folder):
        return None
    try:
        listing = list(_list(name, spec))
    except _TooManyError:
        if not _has_init(spec) and name not in sys.modules:
            return None  # any folder can be a namespace package, but one this large probably is not
        reason = f"its folder has more than {_MAX_ENTRIES} entries"
        return Package(Wanted(name, "", str(folder)), (), reason)
    wanted = Wanted(name, _fingerprint(listing), str(folder))
    python = [entry for entry in listing if entry.suffix == ".py"]
    compiled = [Path(entry.path).name for entry in listing if entry.path and entry.suffix != ".py"]
    if not python and not compiled:
        return None
    size = sum(entry.size for entry in python)
    if size > _MAX_BYTES:
        return Package(wanted, (), f"its Python files have {size >> 20} MB, more than {_MAX_BYTES >> 20} MB")
    try:
        files = tuple(File(e.module, e.is_package, e.path, Path(e.path).read_bytes()) for e in python)
    except OSError as error:
        return Package(wanted, (), f"a file cannot be read ({error})")
    namespaces = tuple(File(e.module, True, "", b"") for e in listing if not e.path)
    return Package(wanted, files + namespaces, f"it has compiled modules ({compiled[0]})" if compiled else "")


def is_importable(name: str) -> bool:
    return _find_spec(name) is not None


def pack(packages: Iterable[Package]) -> bytes:
    """Return the files of those packages that can be sent, for `install`."""
    files = [file for package in packages if not package.unsendable for file in package.files]
    return zlib.compress(msgspec.msgpack.encode(files), 1)


def top_level(name: str) -> str:
    return name.partition(".")[0]


class _Candidates:
    """Rule out quickly most strings that do not name one of the user's own packages."""

    def __init__(self) -> None:
        self._known = {name for name in sys.modules if "." not in name}
        for entry in map(Path, sys.path):
            if not _is_for_packages(entry):
                self._known.update(name.partition(".")[0] for name in _names(entry))
        usual = (BuiltinImporter, FrozenImporter, PathFinder)
        self._finders = [finder for finder in sys.meta_path if finder not in usual]  # from editable installs
        self._known -= sys.stdlib_module_names

    def __call__(self, name: str) -> bool:
        return name in self._known or any(_can_find(finder, name) for finder in self._finders)


def _can_find(finder: Any, name: str) -> bool:
    try:
        return finder.find_spec(name, None) is not None
    except Exception:  # another package's finder may raise anything
        return False


def _imports(source: bytes) -> Iterator[str]:
    for from_, names, dynamic, entry in _IMPORTS.findall(source):
        if names:
            for name in names.split(b","):
                yield from (top_level(word.decode(errors="replace")) for word in name.split()[:1])
        else:
            yield (from_ or dynamic or entry).decode(errors="replace")


# -- on a node ----------------------------------------------------------------------------------------------------


def compare(wanted: Iterable[Wanted]) -> Comparison:
    """Compare packages of the head with those that this process can import, without importing any."""
    importlib.invalidate_caches()
    folders: dict[str, str] = {}
    lacking = []
    for package in wanted:
        if _has_same(package, _find_spec(package.name)):
            continue
        if _has_same(package, PathFinder.find_spec(package.name, [package.folder])):
            folders[package.name] = package.folder
        else:
            lacking.append(package.name)
    return Comparison(folders, tuple(lacking))


def _has_same(package: Wanted, spec: ModuleSpec | None) -> bool:
    if spec is None or _folder(spec) is None:
        return False
    if not package.fingerprint:
        return True
    try:
        return _fingerprint(list(_list(package.name, spec))) == package.fingerprint
    except (OSError, _TooManyError):
        return False


def install(folders: dict[str, str], archive: bytes) -> None:
    """Make `folders` importable from their folders, and the modules in the archive from memory."""
    files = msgspec.msgpack.decode(zlib.decompress(archive), type=list[File]) if archive else []
    sys.meta_path.insert(0, _Finder(folders, {file.module: file for file in files}))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folders: dict[str, str], files: dict[str, File]) -> None:
        self._folders = folders
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._folders:
            return PathFinder.find_spec(name, [self._folders[name]])
        file = self._files.get(name)
        if file is None:
            return None
        if not file.path:
            return ModuleSpec(name, None, is_package=True)
        folders = [str(Path(file.path).parent)] if file.is_package else None
        return importlib.util.spec_from_file_location(
            name, file.path, loader=_Loader(file), submodule_search_locations=folders
        )


class _Loader(importlib.abc.SourceLoader):
    def __init__(self, file: File) -> None:
        self._file = file

    def get_filename(self, fullname: str) -> str:
        return self._file.path

    def get_data(self, path: Any) -> bytes:
        if path != self._file.path:  # bytecode, or a data file beside the module
            raise FileNotFoundError(f"{path}: only Python files were sent with {self._file.module!r}")
        return self._file.source


# -- both ---------------------------------------------------------------------------------------------------------


class _TooManyError(Exception):
    """A folder has more than `_MAX_ENTRIES` entries."""


class _Entry(NamedTuple):
    module: str
    is_package: bool
    path: str  # empty: a folder without `__init__.py`
    suffix: str
    size: int
    mtime_s: int


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except Exception:  # a module without __spec__, or another package's finder
        return None


def _has_init(spec: ModuleSpec) -> bool:
    return bool(spec.has_location and spec.origin)


def _folder(spec: ModuleSpec | None) -> Path | None:
    """Return the folder in which Python found this module or package, if any."""
    if spec is None:
        return None
    at = next(iter(spec.submodule_search_locations or ()), None) or (spec.origin if spec.has_location else None)
    folder = Path(at).absolute().parent if at else None
    return folder if folder is not None and folder.is_dir() else None


def _is_for_packages(folder: Path) -> bool:
    """Return whether everything in this folder is installed."""
    parts = set(folder.absolute().parts)
    return bool({"site-packages", "dist-packages"} & parts) or folder.resolve().is_relative_to(_STDLIB)


def _installed_in(folder: Path) -> set[str]:
    """Return the names that `pip install --target` put into this folder, which may also hold the user's own files."""
    found = set()
    for info in (folder / name for name in _names(folder) if name.endswith(".dist-info")):
        found.add(info.name.partition("-")[0])
        try:
            lines = (info / "RECORD").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        found.update(line.partition(",")[0].partition("/")[0].partition(".")[0] for line in lines)
    return found


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _list(name: str, spec: ModuleSpec) -> Iterator[_Entry]:
    """Yield the files of a module or package that Python could import, and its folders without `__init__.py`."""
    if spec.submodule_search_locations is None:
        if spec.origin:
            status = Path(spec.origin).stat()
            yield _Entry(name, False, spec.origin, _suffix(spec.origin), status.st_size, int(status.st_mtime))
        return
    folders = [(name, location) for location in spec.submodule_search_locations]
    seen: set[tuple[int, int]] = set()
    count = 0
    while folders:
        package, folder = folders.pop()
        try:
            status = Path(folder).stat()
            with os.scandir(folder) as found:
                entries = sorted(itertools.islice(found, _MAX_ENTRIES + 1), key=lambda entry: entry.name)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in seen:  # links may form a cycle
            continue
        seen.add((status.st_dev, status.st_ino))
        count += len(entries)
        if count > _MAX_ENTRIES:
            raise _TooManyError
        if not any(entry.name == "__init__.py" for entry in entries):
            yield _Entry(package, True, "", "", 0, 0)
        for entry in entries:
            suffix, stem = _suffix(entry.name), entry.name.partition(".")[0]
            if not stem.isidentifier():
                continue
            if suffix and entry.is_file():
                status = entry.stat()
                module = package if stem == "__init__" else f"{package}.{stem}"
                yield _Entry(module, stem == "__init__", entry.path, suffix, status.st_size, int(status.st_mtime))
            elif entry.name == stem != "__pycache__" and entry.is_dir():
                folders.append((f"{package}.{stem}", entry.path))


def _suffix(name: str) -> str:
    return next((suffix for suffix in (".py", *EXTENSION_SUFFIXES) if name.endswith(suffix)), "")


def _fingerprint(listing: list[_Entry]) -> str:
    """Return a hash of sizes and times. Hashing contents would delay the start for large packages or slow disks."""
    lines = sorted(f"{entry.module} {entry.suffix} {entry.size} {entry.mtime_s}" for entry in listing if entry.path)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
