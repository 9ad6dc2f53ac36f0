"""Random states are recorded before a batch is read, but not where reading draws no random numbers."""

import datasets
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hftrainer import DataCollatorWithPadding, default_data_collator
from hftrainer.data.collators import RemoveColumnsCollator
from hftrainer.data.epoch_reader import may_draw
from hftrainer.data.loaders import PreparedDataLoader
from tests.support.tiny import tokenizer

ROWS = [{"input_ids": [1, 2], "labels": 0}] * 8
ROWS_OF_DATASETS = datasets.Dataset.from_list(ROWS)
WITHOUT_DRAWS = {
    "a list": {},
    "datasets": {"dataset": ROWS_OF_DATASETS.with_format("torch")},
    "padding": {"collate_fn": DataCollatorWithPadding(tokenizer())},
    "transformers' collator": {"collate_fn": transformers.DefaultDataCollator()},
    "transformers' function": {"collate_fn": transformers.default_data_collator},
    "removed columns": {"collate_fn": RemoveColumnsCollator(default_data_collator, frozenset({"labels"}), "", None)},
    "any order": {"shuffle": True},
}


class Padding(DataCollatorWithPadding):
    """May do more than its base class."""


WITH_DRAWS = {
    "transform": {"dataset": ROWS_OF_DATASETS.with_transform(lambda rows: rows)},
    "a dataset of the script": {"dataset": TensorDataset(torch.zeros(8))},
    "samples of the script": {"dataset": [transformers.BatchEncoding(row) for row in ROWS]},
    "subclass": {"collate_fn": Padding(tokenizer())},
    "function": {"collate_fn": lambda rows: rows},
    "masks": {"collate_fn": transformers.DataCollatorForLanguageModeling(tokenizer(mask_token="<m>"))},
    "removed, then the script's": {"collate_fn": RemoveColumnsCollator(list, frozenset({"labels"}), "", None)},
    "replacement": {"sampler": RandomSampler(ROWS, replacement=True)},
    "batch sampler": {"batch_sampler": [[0], [1]]},
}


@pytest.mark.parametrize("case", [*WITHOUT_DRAWS, *WITH_DRAWS])
def test_random_states_are_recorded_where_reading_may_draw(case):
    settings = {"dataset": ROWS, "collate_fn": default_data_collator, **(WITHOUT_DRAWS | WITH_DRAWS)[case]}
    loader = PreparedDataLoader(DataLoader(**settings), torch.device("cpu"))
    assert may_draw(loader) is (case in WITH_DRAWS)
