"""Sources of a mixture whose samples can be told apart."""

from torch.utils.data import IterableDataset

from tests.support.small_models import plain_data

WEIGHTS = {"code": 0.7, "chat": 0.3}
SIZES = {"code": 20, "chat": 7}


class Stream(IterableDataset):
    """Samples without an order of their own; each pass adds 100 to the first feature."""

    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for row in self.rows:
            yield {**row, "x": row["x"] + 100 * self.epoch}


def make_sources(kind="map-style"):
    """The first feature of a sample is its index, above 1000 in the second source."""
    sources = {}
    for first, (name, size) in zip((0, 1000), SIZES.items(), strict=True):
        sources[name] = rows = plain_data(size)
        for index, row in enumerate(rows):
            row["x"][0] = first + index
    if kind == "streams":
        return {name: Stream(rows) for name, rows in sources.items()}
    return {"code": Stream(sources["code"]), "chat": sources["chat"]} if kind == "both" else sources
