"""Source of a data set: its official archives, and their conversion to its .npz file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fixpoint.data import storage as cache
from fixpoint.data.archives.download import Archive, Bar, download
from fixpoint.data.corrupt import as_value_error
from fixpoint.data.schema import Arrays


@dataclass(frozen=True, kw_only=True)
class Source:
    """The official archives of a data set, and the .npz file that is made from them.

    Args:
        name: a data set of this source, as 'fixpoint data fetch' takes it.
        file: name of the .npz file in the data folder.
        subset_file: name of a file with a part of the data, which is read if `file` does not
            exist; empty if there is none.
        archives: what is downloaded; empty where the authors require registration.
        page: the official page.
        needs: the files to supply by hand, for messages.
        parse: converts archives to the arrays of the file, or raises ValueError.
        verify: raises ValueError, in one line, unless the arrays are those of the data set.
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
        """The way to get the file, as a clause for messages."""
        if self.archives:
            return f"run 'fixpoint data fetch {self.name}' (from {self.archives[0].url})"
        return (
            f"get {self.needs} from {self.page} and run "
            f"'fixpoint data fetch {self.name} --archive FILE'"
        )

    def find(self) -> tuple[Path, bool]:
        """Return the path of the file, and whether it is the complete data set.

        Raises:
            FileNotFoundError: it does not exist.
        """
        for name in (self.file, self.subset_file):
            if name and (cache.folder() / name).is_file():
                return cache.folder() / name, name == self.file
        return cache.find(self.file, self.remedy), True

    def make(self, paths: Sequence[Path]) -> Arrays:
        """Parse archives to the arrays of the file and verify them.

        Raises:
            ValueError: they are damaged, or are not those of the data set.
            FileNotFoundError: an archive does not exist.
        """
        with as_value_error(" ".join(str(path) for path in paths)):
            arrays = self.parse(paths)
        self.verify(arrays)
        return arrays

    def obtain(self, bar: Callable[[Archive], Bar | None] = lambda archive: None) -> list[Path]:
        """Return paths of the official archives, in the folder `downloads` of the data folder.

        Args:
            bar: creates the progress bar of a download.

        Raises:
            OSError: a download failed.
            ValueError: the checksum of one differs, or the authors require registration.
        """
        if not self.archives:
            raise ValueError(f"{self.name} requires registration: {self.remedy}")
        folder = cache.folder() / "downloads"
        return [download(archive, folder, bar(archive)) for archive in self.archives]

    def install(self, paths: Sequence[Path]) -> Path:
        """Make the file in the data folder from archives.

        An existing file is replaced when the new one is complete, and is unchanged if anything
        fails. A wrong download without a published checksum is removed.

        Raises:
            OSError: an archive does not exist, or the folder cannot be written.
            ValueError: an archive is not the official one.
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
