"""Downloads, from a server in this process."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fixpoint.data.archives.download import Archive, download

CONTENT = bytes(range(256)) * 2000
CHECKSUM = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT; breaks off after `breaks` bytes where that is set."""

    ranges = True
    breaks = None
    asked: list

    def do_GET(self):
        start = 0
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        if self.path != "/a.zip":
            self.send_error(404)
            return
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(CONTENT):
                self.send_error(416)
                return
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.breaks])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Own", (Handler,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def archive(url, checksum=CHECKSUM):
    return Archive(url=f"{url}/a.zip", file="a.zip", checksum=checksum)


class Bar:
    def __init__(self):
        self.total, self.done, self.closed = 0, 0, False

    def update(self, n):
        self.done += n

    def reset(self):
        self.done = 0

    def close(self):
        self.closed = True


@pytest.mark.parametrize("checksum", [CHECKSUM, None])
def test_a_file_is_downloaded_once(server, tmp_path, checksum):
    handler, url = server
    bar = Bar()
    path = download(archive(url, checksum), tmp_path / "new", bar)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["a.zip"]
    assert (bar.total, bar.done, bar.closed) == (len(CONTENT), len(CONTENT), True)
    assert download(archive(url, checksum), tmp_path / "new") == path
    assert len(handler.asked) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_resumed(server, tmp_path, ranges):
    handler, url = server
    handler.breaks, handler.ranges = 200_000, ranges
    bar = Bar()
    with pytest.raises(OSError, match=r"could not be downloaded .*try again.*--archive FILE"):
        download(archive(url), tmp_path, bar)
    assert bar.closed
    part = tmp_path / "a.zip.part"
    kept = part.stat().st_size
    assert 0 < kept <= 200_000
    assert part.read_bytes() == CONTENT[:kept]
    handler.breaks = None
    assert download(archive(url), tmp_path).read_bytes() == CONTENT
    assert handler.asked == [None, f"bytes={kept}-"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


def test_another_file_is_refused_and_not_kept(server, tmp_path):
    _, url = server
    with pytest.raises(ValueError, match="another file than the published one") as error:
        download(archive(url, f"sha256:{'0' * 64}"), tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_file_is_found_out_and_not_kept(server, tmp_path):
    _, url = server
    for size in (100, len(CONTENT) + 1):
        (tmp_path / "a.zip.part").write_bytes(bytes([1]) * size)
        with pytest.raises((ValueError, OSError), match="another file|416"):
            download(archive(url), tmp_path)
        assert download(archive(url), tmp_path).read_bytes() == CONTENT
        (tmp_path / "a.zip").unlink()


def test_a_file_at_hand_is_known_by_its_checksum(tmp_path):
    (tmp_path / "a.zip").write_bytes(CONTENT)
    (tmp_path / "b.zip").write_bytes(CONTENT[1:])
    md5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
    for checksum in (CHECKSUM, md5):
        assert archive("", checksum).is_file(tmp_path / "a.zip")
        assert not archive("", checksum).is_file(tmp_path / "b.zip")
    assert not archive("", None).is_file(tmp_path / "a.zip")


def test_a_missing_page_and_a_missing_server(server, tmp_path):
    _, url = server
    lost = Archive(url=f"{url}/b.zip", file="b.zip", checksum=None)
    with pytest.raises(OSError, match="404") as error:
        download(lost, tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(OSError, match="could not be downloaded"):
        download(Archive(url="http://127.0.0.1:1/a", file="a", checksum=None), tmp_path)
