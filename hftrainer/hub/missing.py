"""What has not arrived in a repository yet, and the pictures that are kept to make up for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from hftrainer.hub.pictures import Parcel


@dataclass(frozen=True)
class Missing:
    """A parcel that is not there yet.

    Attributes:
        parcel: which.
        why: it is not there, as the end of a sentence.
        picture: the folder to upload; None when there is none.
        waiting: whether its upload is lined up or under way, which then needs the picture.
    """

    parcel: Parcel
    why: str
    picture: str | None = None
    waiting: bool = False


class MissingParcels:
    """Of each place in the repository, the newest parcel that is not there; for several threads.

    Pictures are kept of the newest model and of the newest checkpoint only: more would keep the disk space of
    checkpoints that `save_total_limit` has deleted.

    Args:
        discard: deletes a picture.
    """

    def __init__(self, discard: Callable[[str], None]) -> None:
        self._discard = discard
        self._lock = threading.RLock()
        self._entries: dict[str, Missing] = {}
        self._arrived: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def oldest_first(self) -> list[Missing]:
        """All that are missing."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: entry.parcel.number)

    def arrived(self) -> dict[str, str]:
        """Of each place the message of the last commit."""
        with self._lock:
            return dict(self._arrived)

    def forget_arrived(self) -> None:
        """Begin anew to list what has arrived."""
        with self._lock:
            self._arrived.clear()

    def add(self, entry: Missing) -> None:
        """Note a parcel that is missing, or what is new about it, unless a newer one to the place is."""
        with self._lock:
            place = entry.parcel.path_in_repo
            known = self._entries.get(place)
            if known is not None and known.parcel.number > entry.parcel.number:
                self._let_go(entry)
                return
            self._entries[place] = entry
            if known is not None and known.picture != entry.picture:
                self._let_go(known)
            if not entry.waiting:
                self._keep_the_newest(bool(place))

    def arrive(self, parcel: Parcel, picture: str | None = None) -> None:
        """Note that a parcel is there, which makes up for older ones to the same place."""
        with self._lock:
            self._arrived[parcel.path_in_repo] = parcel.message
            if picture is not None:
                self._discard(picture)
            known = self._entries.get(parcel.path_in_repo)
            if known is not None and known.parcel.number <= parcel.number:
                self._let_go(self._entries.pop(parcel.path_in_repo))

    def drop(self, parcel: Parcel, picture: str) -> None:
        """Forget a parcel that was called off."""
        with self._lock:
            known = self._entries.get(parcel.path_in_repo)
            if known is not None and known.parcel is parcel:
                del self._entries[parcel.path_in_repo]
            self._discard(picture)

    def _keep_the_newest(self, whole: bool) -> None:
        """Let go of the pictures of all checkpoints, or models, but the newest."""
        kept = [entry for place, entry in self._entries.items() if bool(place) is whole and _is_kept(entry)]
        for entry in sorted(kept, key=lambda entry: entry.parcel.number)[:-1]:
            self._let_go(entry)
            self._entries[entry.parcel.path_in_repo] = replace(entry, picture=None)

    def _let_go(self, entry: Missing) -> None:
        if _is_kept(entry) and entry.picture is not None:
            self._discard(entry.picture)


def _is_kept(entry: Missing) -> bool:
    """Whether a picture is there for a later attempt only."""
    return entry.picture is not None and not entry.waiting
