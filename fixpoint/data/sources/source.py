"""Where the file of a data set comes from, and how it is made from the official archives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fixpoint.data import storage as cache
from fixpoint.data.archives.download import Archive, Bar, download
from fixpoint.data.corrupt import one_line
from fixpoint.data.schema import Arrays


@dataclass(frozen=True, kw_only=True)
class Source:
    """The official archives of a data set, and the .npz file that is made from them.

    Args:
        name: a data set of this source, as 'fixpoint data fetch' takes it.
        file: name of the .npz file in the data folder.
        subset_file: name of a file with a part of the data, which is read while `file` is not
            there; empty if there is none.
        archives: what is downloaded; empty where the authors want a registration.
        page: where a person gets the archives.
        needs: which files to give by hand.
        parse: makes the arrays of the file from archives, or raises ValueError.
        verify: raises ValueError, in one line, where arrays are not those of the data set.
    """

    name: str
    file: str
    subset_file: str = ""
    archives: tuple[Archive, ...]
    page: str
    needs: str
    parse: Callable[[Sequence[Path]], Arrays]
    verify: Callable[[Arrays], None]

    @property
    def remedy(self) -> str:
        """How to get the file, as one clause."""
        if self.archives:
            return f"run 'fixpoint data fetch {self.name}' (from {self.archives[0].url})"
        return (
            f"get {self.needs} from {self.page} and run "
            f"'fixpoint data fetch {self.name} --archive FILE'"
        )

    def find(self) -> tuple[Path, bool]:
        """Path of the file, and whether it holds all of the data set.

        Raises:
            FileNotFoundError: it is not there.
        """
        for name in (self.file, self.subset_file):
            if name and (cache.folder() / name).is_file():
                return cache.folder() / name, name == self.file
        return cache.find(self.file, self.remedy), True

    def make(self, paths: Sequence[Path]) -> Arrays:
        """The verified arrays of the file, from archives.

        Raises:
            ValueError: they are damaged, or do not hold the data set.
            FileNotFoundError: an archive is not there.
        """
        with one_line(" ".join(str(path) for path in paths)):
            arrays = self.parse(paths)
        self.verify(arrays)
        return arrays

    def obtain(self, bar: Callable[[Archive], Bar | None] = lambda archive: None) -> list[Path]:
        """Paths of the official archives, in the folder `downloads` of the data folder.

        Args:
            bar: makes the progress bar of a download.

        Raises:
            OSError: one cannot be had.
            ValueError: one is another file, or the authors want a registration.
        """
        if not self.archives:
            raise ValueError(f"{self.name} is not to be had without a registration: {self.remedy}")
        folder = cache.folder() / "downloads"
        return [download(archive, folder, bar(archive)) for archive in self.archives]

    def install(self, paths: Sequence[Path]) -> Path:
        """Make the file in the data folder from archives.

        The file that was there is replaced when the new one is whole, and stays where anything
        fails. A download without a published checksum that turns out wrong is removed.

        Raises:
            OSError: an archive is not there, or the folder cannot be written.
            ValueError: an archive is not what it should be.
        """
        target = cache.folder() / self.file
        try:
            arrays = self.make(paths)
        except ValueError:
            for archive in self.archives:
                path = cache.folder() / "downloads" / archive.file
                if not archive.pinned and path in paths:
                    path.unlink()
            raise
        cache.write_npz(target, arrays)
        return target
