"""Downloads of official archives: verified, resumable, with a progress bar."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fixpoint._messages import missing_extra


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An official archive.

    Args:
        url: its address.
        file: its name on disk.
        checksum: "sha256:..." or "md5:..."; None where none is published.

    >>> Archive(url="https://example.org/a.zip", file="a.zip", checksum=None).pinned
    False
    """

    url: str
    file: str
    checksum: str | None

    @property
    def pinned(self) -> bool:
        return self.checksum is not None

    def is_file(self, path: Path) -> bool:
        """Tell whether a file has the published checksum."""
        if self.checksum is None or not path.is_file():
            return False
        try:
            import pooch
        except ModuleNotFoundError:
            raise missing_extra("a download", "pooch", "bench") from None

        method, _, digest = self.checksum.partition(":")
        return pooch.file_hash(str(path), alg=method) == digest


class Bar(Protocol):
    """The interface of a progress bar that pooch expects."""

    total: int

    def update(self, n: int, /) -> object: ...

    def reset(self) -> object: ...

    def close(self) -> object: ...


def download(archive: Archive, folder: Path, bar: Bar | None = None) -> Path:
    """Return the path of the archive in `folder`, downloaded if it is not there.

    After a broken connection the part received is kept in `folder`, and the next call resumes from
    there if the server supports it.

    Raises:
        OSError: the download failed; the message says how to supply the file by hand.
        ValueError: the checksum differs from the published one.
    """
    try:
        import pooch
    except ModuleNotFoundError:
        raise missing_extra("a download", "pooch", "bench") from None

    pooch.get_logger().setLevel("ERROR")
    try:
        path = pooch.retrieve(
            archive.url,
            known_hash=archive.checksum,
            fname=archive.file,
            path=folder,
            downloader=_Resuming(folder / f"{archive.file}.part", bar),
        )
    except OSError as error:  # of requests too
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise OSError(
            f"{archive.url} could not be downloaded ({reason}); try again, or download it "
            "by other means and pass it with --archive FILE"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{archive.url} gave another file than the published one: its checksum must be "
            f"{archive.checksum}; try again later"
        ) from error
    finally:
        if bar is not None:
            bar.close()
    return Path(path)


class _Resuming:
    """Downloader for pooch that resumes an interrupted download."""

    def __init__(self, part: Path, bar: Bar | None) -> None:
        self.part = part
        self.bar = bar

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        from pooch import HTTPDownloader

        self.part.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file = stack.enter_context(self.part.open("ab"))
            start = file.tell()

            def check(response: Any, *args: Any, **more: Any) -> None:
                stack.callback(response.close)
                # The server sent the whole file, or the part is not a prefix of the file.
                if response.status_code in (200, 416):
                    file.truncate(0)

            headers = {"Range": f"bytes={start}-"} if start else {}
            get = HTTPDownloader(
                progressbar=self.bar or False,
                chunk_size=2**16,
                headers={"Accept-Encoding": "identity", **headers},
                hooks={"response": check},
            )
            get(url, file, pooch)
        self.part.replace(output_file)
