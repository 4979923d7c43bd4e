"""The pictures of a comparison as PNG files."""

from __future__ import annotations

from pathlib import Path

from hocket.compare import canvas, figures, whole
from hocket.compare.results import Comparison
from hocket.errors import UsageError

_HEAD = 1024  # bytes of a PNG in which it says what made it


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes all pictures of ``comparison`` into ``folder``, which is made if it is not there.

    Those of an earlier report that are no more are removed.

    Raises:
        UsageError: matplotlib is missing, the folder cannot be written to, or a picture could not be drawn, which is
            then not there while all others are.
    """
    canvas.check()
    paths, undrawn = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in figures.pictures(comparison):
            try:
                content = canvas.png(picture)
            except Exception as error:  # whatever it is, the others are still worth having
                undrawn.append(canvas.why_not(picture, error))
                continue
            paths.append(folder / f"{picture.name}.png")
            whole.write(paths[-1], content)
        for old in set(folder.glob("*.png")) - set(paths):
            if _is_ours(old):
                old.unlink()
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error.strerror or error}; name another folder") from error
    if undrawn:
        raise UsageError(f"{'; '.join(undrawn)}; all others are in {folder}")
    return paths


def _is_ours(path: Path) -> bool:
    """What else lies in the folder stays."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f"Software\0{canvas.SOFTWARE}".encode() in file.read(_HEAD)
