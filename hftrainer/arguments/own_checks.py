"""Checks of the arguments that are ours alone."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import OptimizerNames, spelled

_LAYERWISE = [each.value for each in OptimizerNames if each.value.endswith("layerwise")]


def check_own(args: BaseArguments) -> Iterator[str]:
    """Errors in the values of these arguments."""
    yield from _check_tokens_per_batch(args)
    yield from _check_mixture(args)
    yield from _check_divergence(args)


def _check_tokens_per_batch(args: BaseArguments) -> Iterator[str]:
    if args.tokens_per_batch is None:
        return
    asked = f"tokens_per_batch={args.tokens_per_batch}"
    if args.tokens_per_batch < 1:
        yield f"{asked}: give a positive number."
    if args.train_sampling_strategy != "random" or getattr(args, "sortish_sampler", False):
        yield f"{asked} chooses the batches itself: leave train_sampling_strategy='random', without sortish_sampler."
    for name in ("elastic", "auto_find_batch_size"):
        if getattr(args, name):
            yield f"{asked} gives batches of varying numbers of samples, which {name}=True needs fixed: remove one."
    if args.torch_compile and args.flatten_batches:
        yield f"{asked} with flatten_batches=True gives each batch its own shape: remove one of them."


def _check_mixture(args: BaseArguments) -> Iterator[str]:
    weights = args.mixture_weights
    if not (weights is None or isinstance(weights, Mapping) or callable(weights)):
        yield f"mixture_weights={weights!r}: give a dict, source → weight, or a function of the optimizer step."
    if callable(weights):
        try:
            pickle.dumps(weights)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            yield (
                f"mixture_weights: checkpoints hold the arguments, and this function cannot be pickled ({error}). "
                "Define it with def at the top of a module, not as a lambda or inside a function."
            )
    if weights is not None and args.mixture_temperature != 1:
        yield "mixture_temperature makes weights of the sizes, and mixture_weights are given: choose one."
    if not args.mixture_temperature > 0:
        yield f"mixture_temperature={args.mixture_temperature!r}: give a number above 0."


def _check_divergence(args: BaseArguments) -> Iterator[str]:
    threshold = args.divergence_threshold
    if args.on_divergence is None and (threshold is not None or args.max_rollbacks != 3):
        yield "divergence_threshold and max_rollbacks need on_divergence: set it to 'rollback' or 'stop'."
    if args.on_divergence is not None and spelled(args.optim) in ("lomo", "adalomo", *_LAYERWISE):
        yield f"on_divergence={args.on_divergence!r}: optim={spelled(args.optim)!r} changes weights before it is known."
    if isinstance(threshold, bool) or (
        threshold is not None and not (isinstance(threshold, (int, float)) and threshold > 0)
    ):
        yield f"divergence_threshold={threshold!r}: give a number of standard deviations above 0, such as 10, or None."
    if args.on_divergence == "rollback":
        if args.auto_find_batch_size:
            yield "on_divergence='rollback' skips batches, which auto_find_batch_size=True would change: choose one."
        if args.ignore_data_skip:
            yield "on_divergence='rollback' reads on, which ignore_data_skip=True prevents: choose one."
        if args.save_only_model:
            yield "on_divergence='rollback' needs the optimizer's state in checkpoints: set save_only_model=False."
