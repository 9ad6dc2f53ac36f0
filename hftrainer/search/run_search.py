"""The implementation of `Trainer.hyperparameter_search`: search backends, and arguments of a trial."""

from __future__ import annotations

import logging
from typing import Any

from hftrainer.arguments.choices import HPSearchBackend
from hftrainer.assembly.trainer_parts import TrainerParts
from hftrainer.base.messages import tell
from hftrainer.base.signatures import can_call
from hftrainer.callbacks.state import hyperparameters
from hftrainer.compat.overrides import refuse_uncalled_methods
from hftrainer.errors import InvalidArgument, InvalidSetup, MissingPackage, UnsupportedArgument
from hftrainer.plugins import import_adapter
from hftrainer.search.backend import SearchBackend
from hftrainer.search.optuna_search import OptunaSearch
from hftrainer.search.trial_arguments import model_takes_trial, set_arguments
from hftrainer.search.wandb_search import WandbSearch
from hftrainer.trainer_utils import BestRun, default_compute_objective

logger = logging.getLogger(__name__)

#: Name → class of a search backend. The first is the default.
ALL_HYPERPARAMETER_SEARCH_BACKENDS: dict[HPSearchBackend, type[SearchBackend]] = {
    HPSearchBackend.OPTUNA: OptunaSearch,
    HPSearchBackend.RAY: import_adapter("ray", "search").RaySearch,
    HPSearchBackend.WANDB: WandbSearch,
}


def make_backend(backend: str | HPSearchBackend | None, parts: TrainerParts) -> tuple[HPSearchBackend, SearchBackend]:
    """The name of the search backend, and a new instance.

    Raises:
        InvalidArgument: for an unknown name.
        UnsupportedArgument: for a library whose service was shut down.
        MissingPackage: if the library is not installed.
    """
    if backend == HPSearchBackend.SIGOPT:
        raise UnsupportedArgument("backend='sigopt': SigOpt's service was shut down. Use backend='optuna'.")
    name = HPSearchBackend(backend if backend is not None else next(iter(ALL_HYPERPARAMETER_SEARCH_BACKENDS)))
    backend_class = ALL_HYPERPARAMETER_SEARCH_BACKENDS[name]
    if not backend_class.is_available():
        raise MissingPackage(
            f"backend={name.value!r} needs a package that is not installed: pip install {backend_class.install}"
        )
    return name, backend_class(parts)


def search(
    parts: TrainerParts,
    hp_space: Any,
    compute_objective: Any,
    n_trials: int | None,
    direction: Any,
    backend: str | HPSearchBackend | None,
    hp_name: Any,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Check the arguments of a search, run it, and then restore the training arguments."""
    trainer = parts.trainer
    name, search_backend = make_backend(backend, parts)
    if trainer.model_init is None:
        raise InvalidSetup(
            "hyperparameter_search trains a new model in each trial: pass Trainer a model_init, which creates "
            "the model, instead of a model."
        )
    for option, function in {"hp_space": hp_space, "compute_objective": compute_objective, "hp_name": hp_name}.items():
        if function is not None and not (callable(function) and can_call(function, None)):
            argument = "an evaluation's metrics" if option == "compute_objective" else "the trial"
            raise InvalidArgument(f"{option}={function!r}: pass a function of one argument, {argument}.")
    if name == HPSearchBackend.RAY:
        refuse_uncalled_methods(type(trainer), "_tune_save_checkpoint")
    trainer.hp_space = hp_space if hp_space is not None else search_backend.default_hp_space
    trainer.compute_objective = compute_objective if compute_objective is not None else default_compute_objective
    trainer.hp_name = hp_name
    trainer.hp_search_backend, parts.search_backend = name, search_backend
    parts.arguments_before_search = dict(vars(trainer.args))
    try:
        return search_backend.run(trainer, n_trials, direction, **kwargs)
    finally:
        trainer.hp_search_backend = parts.search_backend = None
        _restore_arguments(parts)
        parts.arguments_before_search = None
        parts.needs_rebuild = True


def set_trial_arguments(parts: TrainerParts, trial: Any) -> None:
    """Set the trial's arguments, and reset all others to their values before the search."""
    trainer = parts.trainer
    # `train(trial=...)` outside a search.
    if parts.search_backend is None:
        params = hyperparameters(trial)
    else:
        params = parts.search_backend.hyperparameters(trainer, trial)
        _restore_arguments(parts)
    set_arguments(trainer.args, params, allow_model_arguments=model_takes_trial(trainer.model_init))
    logger.info("Trial: %s", dict(params))
    if parts.search_backend is not None and trainer.is_world_process_zero():
        shown = (f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in params.items())
        tell(f"Trial {parts.search_backend.run_id(trial)}: {', '.join(shown)}.")


def _restore_arguments(parts: TrainerParts) -> None:
    arguments = parts.arguments_before_search
    assert arguments is not None
    vars(parts.trainer.args).clear()
    vars(parts.trainer.args).update(arguments)
