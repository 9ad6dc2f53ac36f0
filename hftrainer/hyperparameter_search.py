"""Re-exports `hftrainer.search` under the name of transformers' module."""

from hftrainer.search.run_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS as ALL_HYPERPARAMETER_SEARCH_BACKENDS
