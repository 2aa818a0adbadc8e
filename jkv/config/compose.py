"""Finds configuration files by name and puts a configuration's sections together.

Knows folders, names and `base`; of the keys inside a section only that a model's sizes go with its path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jkv.config.errors import COMMAND_LINE, Place, Problem, did_you_mean
from jkv.config.source import Entry, display, merge, read_yaml

# A section's kind and the folder of its files.
FOLDERS = {"model": "models", "cache": "caches", "mesh": "meshes", "engine": "engines"}


def compose(config: str, names: Mapping[str, str], problems: list[Problem]) -> dict[str, Entry]:
    """Return each section of a configuration with its names and bases resolved.

    Args:
        config: a file's path (ending in .yaml), or the name of one in `configs/`.
        names: section kind -> name or path that replaces what the file says.
        problems: takes what is wrong; a section that cannot be read is left out.
    """
    roots = (Path("configs"), bundled_configs())
    file = _locate(config, _Library(roots, ""), COMMAND_LINE, "", problems)
    top = read_yaml(file, problems) if file else None
    if file is None or top is None:
        return {}
    if not isinstance(top.value, dict):
        problems.append(
            Problem(top.place, "", f"must be a mapping of {', '.join(FOLDERS)}, got {top.shown()}")
        )
        return {}
    entries = top.value | {kind: Entry(name, COMMAND_LINE) for kind, name in names.items()}
    _check_kinds(entries, top.place, problems)
    sections = {}
    for kind, folder in FOLDERS.items():
        if kind in entries:
            library = _Library((file.parent, *roots), folder)
            sections[kind] = _resolve(kind, entries[kind], library, (), problems)
    return {kind: entry for kind, entry in sections.items() if entry is not None}


def bundled_configs() -> Path:
    """Return the folder of the configurations that come with jkv: the wheel's, or the checkout's."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def section_names(kind: str) -> list[str]:
    """Return the names of a section's files, bundled or in the working folder's configs."""
    return _Library((Path("configs"), bundled_configs()), FOLDERS[kind]).names()


@dataclass(frozen=True)
class _Library:
    """Where the files of one kind are, the nearest first."""

    roots: tuple[Path, ...]
    folder: str

    def find(self, name: str) -> Path | None:
        """Return the first file of this name."""
        files = (root / self.folder / f"{name}.yaml" for root in self.roots)
        return next((file for file in files if file.is_file()), None)

    def names(self) -> list[str]:
        """Return every name there is, sorted."""
        return sorted({file.stem for root in self.roots for file in (root / self.folder).glob("*.yaml")})


def _check_kinds(entries: Mapping[str, Entry], place: Place, problems: list[Problem]) -> None:
    for key, entry in entries.items():
        if key not in FOLDERS:
            known = did_you_mean(key, FOLDERS) or f"; known: {', '.join(FOLDERS)}"
            problems.append(Problem(entry.place, key, f"is not a section{known}"))
    for kind in FOLDERS:
        if kind not in entries:
            problems.append(Problem(place, kind, "is missing; name a file or write a mapping"))


def _resolve(
    kind: str, entry: Entry, library: _Library, seen: tuple[Path, ...], problems: list[Problem]
) -> Entry | None:
    """Follow names and bases until a section is one mapping."""
    if isinstance(entry.value, str):
        file = _locate(entry.value, library, entry.place, kind, problems)
        if file is None:
            return None
        if file in seen:
            chain = " -> ".join(display(step) for step in (*seen, file))
            problems.append(
                Problem(entry.place, kind, f"must not be its own base, got {chain}; break the circle")
            )
            return None
        read = read_yaml(file, problems)
        return read and _resolve(kind, read, library, (*seen, file), problems)
    if not isinstance(entry.value, dict):
        problems.append(Problem(entry.place, kind, f"must be a name or a mapping, got {entry.shown()}"))
        return None
    own = Entry({key: value for key, value in entry.value.items() if key != "base"}, entry.place)
    if "base" not in entry.value:
        return own
    base = _resolve(kind, entry.value["base"], library, seen, problems)
    if base and kind == "model" and "path" in own.value:
        # Sizes are those of the base's own path.
        base = Entry({key: value for key, value in base.value.items() if key != "sizes"}, base.place)
    return base and merge(base, own)


def _locate(name: str, library: _Library, place: Place, key: str, problems: list[Problem]) -> Path | None:
    """Find a file by its name, or by its path from the file that names it."""
    if name.endswith((".yaml", ".yml")):
        folder = Path() if place == COMMAND_LINE else Path(place.file).parent
        file = folder / name
        if not file.is_file():
            found = "is a folder" if file.is_dir() else "does not exist"
            problems.append(Problem(place, key, f"must be a file, got {display(file)}, which {found}"))
            return None
        return file
    file = library.find(name)
    if file is None:
        names = library.names()
        known = did_you_mean(name, names) or f"; known: {', '.join(names) or 'none'}"
        problems.append(
            Problem(place, key, f'must name a file in {Path("configs", library.folder)}, got "{name}"{known}')
        )
    return file
