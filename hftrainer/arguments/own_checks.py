"""Checks of the arguments that only hftrainer has."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import OptimizerNames, as_text

_LAYERWISE = [name.value for name in OptimizerNames if name.value.endswith("layerwise")]


def check_own(args: BaseArguments) -> Iterator[str]:
    """An error message for each wrong value of these arguments."""
    yield from _check_tokens_per_batch(args)
    yield from _check_mixture(args)
    yield from _check_divergence(args)


def _check_tokens_per_batch(args: BaseArguments) -> Iterator[str]:
    if args.tokens_per_batch is None:
        return
    setting = f"tokens_per_batch={args.tokens_per_batch}"
    if args.tokens_per_batch < 1:
        yield f"{setting}: use a positive number."
    if args.train_sampling_strategy != "random" or getattr(args, "sortish_sampler", False):
        yield f"{setting} chooses the batches: keep train_sampling_strategy='random', without sortish_sampler."
    for name in ("elastic", "auto_find_batch_size"):
        if getattr(args, name):
            yield f"{setting} makes batches of varying sizes, but {name}=True needs a fixed size: remove one."
    if args.torch_compile and args.flatten_batches:
        yield (
            f"{setting} with flatten_batches=True makes batches of varying shapes, and torch_compile compiles each: "
            "remove one of them."
        )


def _check_mixture(args: BaseArguments) -> Iterator[str]:
    weights = args.mixture_weights
    if not (weights is None or isinstance(weights, Mapping) or callable(weights)):
        yield f"mixture_weights={weights!r}: use a dict, source → weight, or a function of the optimizer step."
    if callable(weights):
        try:
            pickle.dumps(weights)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            yield (
                f"mixture_weights: checkpoints contain the arguments, but this function cannot be pickled ({error}). "
                "Define it with def at the top of a module, not as a lambda or inside a function."
            )
    if weights is not None and args.mixture_temperature != 1:
        yield "mixture_temperature computes the weights from the sizes, but mixture_weights sets them: choose one."
    if not args.mixture_temperature > 0:
        yield f"mixture_temperature={args.mixture_temperature!r}: use a number above 0."


def _check_divergence(args: BaseArguments) -> Iterator[str]:
    threshold = args.divergence_threshold
    if args.on_divergence is None and (threshold is not None or args.max_rollbacks != 3):
        yield "divergence_threshold and max_rollbacks need on_divergence: set it to 'rollback' or 'stop'."
    if args.on_divergence is not None and as_text(args.optim) in ("lomo", "adalomo", *_LAYERWISE):
        yield (
            f"on_divergence={args.on_divergence!r} checks a step before it changes weights, but "
            f"optim={as_text(args.optim)!r} changes them during the backward pass: choose another optim."
        )
    if isinstance(threshold, bool) or (
        threshold is not None and not (isinstance(threshold, (int, float)) and threshold > 0)
    ):
        yield f"divergence_threshold={threshold!r}: use a number of standard deviations above 0, such as 10, or None."
    if args.on_divergence == "rollback":
        if args.auto_find_batch_size:
            yield "on_divergence='rollback' skips batches, which auto_find_batch_size=True would change: choose one."
        if args.ignore_data_skip:
            yield "on_divergence='rollback' continues the epoch's data, but ignore_data_skip restarts it: choose one."
        if args.save_only_model:
            yield "on_divergence='rollback' needs the optimizer's state in checkpoints: set save_only_model=False."
