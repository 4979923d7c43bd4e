"""The pictures of a comparison as PNG files."""

from __future__ import annotations

from pathlib import Path

from hocket.compare import canvas, figures
from hocket.compare.results import Comparison
from hocket.errors import UsageError


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes all pictures of ``comparison`` into ``folder``, which is made if it is not there.

    Raises:
        UsageError: matplotlib is missing, or the folder cannot be written to.
    """
    canvas.check()
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in figures.pictures(comparison):
            paths.append(folder / f"{picture.name}.png")
            canvas.png(picture, paths[-1])
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error.strerror or error}; name another folder") from error
    return paths
