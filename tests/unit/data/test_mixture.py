"""Proportions, order and log lines of mixtures; `tests/distributed/test_mixture.py` has several processes."""

import collections
import itertools

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

import hftrainer
from hftrainer.data.mixture import MixturePlan, as_mixture, constant, make_shares
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.parity import assert_same_weights
from tests.support.steps import train

WEIGHTS = {"code": 0.7, "chat": 0.3}
