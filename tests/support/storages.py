"""Storages for `storage_url`: in memory with faults, a folder, and a local S3 server."""

import json
import zlib

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FaultyStorage(MemoryFileSystem):
    """`faulty://`, in memory. `fault` is called with each request, its number and its path, and may raise; or change
    what a listing returns.

    Attributes:
        requests: the requests so far.
        fault: called as `fault(request, path)`.
        hidden: parts of paths that no listing shows.
    """

    protocol = "faulty"
    store, pseudo_dirs = {}, [""]
    requests, fault, hidden = [], None, ()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("faulty://"))

    @classmethod
    def reset(cls):
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.requests, cls.fault, cls.hidden = [], None, ()

    def _note(self, request, path):
        type(self).requests.append((request, path))
        if self.fault is not None:
            type(self).fault(request, path)

    def put_file(self, lpath, rpath, **kwargs):
        self._note("put", rpath)
        super().put_file(lpath, rpath, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        self._note("get", rpath)
        super().get_file(rpath, lpath, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._note("cat", path)
        return super().cat_file(path, start, end, **kwargs)

    def rm_file(self, path):
        self._note("rm", path)
        super().rm_file(path)

    def ls(self, path, detail=True, **kwargs):
        self._note("ls", path)
        found = super().ls(path, detail=True, **kwargs)
        shown = [each for each in found if not any(part in each["name"] for part in self.hidden)]
        return shown if detail else [each["name"] for each in shown]


fsspec.register_implementation("faulty", FaultyStorage, clobber=True)


def complete_checkpoints(url):
    """The checkpoints at a URL whose manifest is there; each must have all files that it lists, as it lists them."""
    system, root = fsspec.url_to_fs(url)
    system.invalidate_cache()
    found = []
    for path in sorted(system.find(root)):
        folder, _, name = path.rpartition("/")
        if name != "hftrainer_manifest.json":
            continue
        try:
            listed = json.loads(system.cat_file(path))["files"]
        except ValueError:
            continue  # a part of a manifest
        for file, entry in listed.items():
            content = system.cat_file(f"{folder}/{file}")
            assert (len(content), zlib.crc32(content)) == (entry["size"], entry["crc32"]), f"{folder}/{file}"
        found.append(folder.rpartition("/")[2])
    return sorted(found, key=lambda name: int(name.rpartition("-")[2]))


def files_at(url):
    system, root = fsspec.url_to_fs(url)
    system.invalidate_cache()
    return sorted(path.removeprefix(root).lstrip("/") for path in system.find(root))
