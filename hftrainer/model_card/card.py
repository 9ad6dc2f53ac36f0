"""Model cards: the `README.md` that describes a model and its training."""

from __future__ import annotations

import functools
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.base.messages import count_of, log_once
from hftrainer.compat import libraries
from hftrainer.compat.version import __version__
from hftrainer.errors import InvalidArgument, MissingPackage, suggest
from hftrainer.model_card import card_contents
from hftrainer.reporting.curves import curves_of_run
from hftrainer.reporting.metrics import write_file_atomically
from hftrainer.reporting.plot import draw_picture

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

    from hftrainer.callbacks.state import TrainerState
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
PLOT_NAME = "training.png"
#: Minimum number of seconds between two plots, since a plot blocks training for half a second.
_SECONDS_BETWEEN_PLOTS = 60
_ADAPTER_OF = "base_model:adapter:"
GENERATED = "generated_from_trainer"
_COMMENT = "<!-- The Trainer generated this card from the run. Complete it, then remove this comment. -->"
_TO_BE_WRITTEN = "_Not written yet._"
#: Module → name of the library in a card.
_FRAMEWORKS = {
    "lightning": "Lightning",
    "torch": "Pytorch",
    "transformers": "Transformers",
    "datasets": "Datasets",
    "tokenizers": "Tokenizers",
}
#: The allowed keys of `dataset_metadata`.
_DATASET_METADATA = ("config", "split", "revision")


@dataclass
class TrainingSummary:
    """The contents of a model card.

    Attributes:
        model_name: the heading, and the name in the model index.
        language: ISO codes of the data's languages, such as 'en'; the Hub checks them when the card is uploaded.
        license: an identifier of the Hub, such as 'apache-2.0'; the Hub checks it in the same way.
        tags: tags of the model on the Hub.
        finetuned_from: the repository of the pretrained model.
        tasks: identifiers such as 'text-classification'.
        dataset: the names of the datasets; default their tags.
        dataset_tags: the identifiers of the datasets on the Hub.
        dataset_args: for each tag, the arguments that loaded the dataset.
        dataset_metadata: for each tag, a dict with any of 'config', 'split' and 'revision'.
        eval_results: title → value, such as `{"Accuracy": 0.9}`.
        eval_lines: one row (column → value) per evaluation.
        hyperparameters: name → value.
        source: 'trainer' adds a comment that the Trainer generated the card.
        library_name: the library that loads the model; None for a plain torch model.
        model_class: the name of the model's class.
        samples: dataset name → number of samples.
        plot: the path of the plot of the training run, relative to the card.

    Raises:
        InvalidArgument: for values of a wrong type.
    """

    model_name: str
    language: str | list[str] | None = None
    license: str | None = None
    tags: str | list[str] | None = None
    finetuned_from: str | None = None
    tasks: str | list[str] | None = None
    dataset: str | list[str] | None = None
    dataset_tags: str | list[str] | None = None
    dataset_args: Any = None
    dataset_metadata: dict[str, Any] | list[dict[str, Any]] | None = None
    eval_results: dict[str, Any] | None = None
    eval_lines: list[dict[str, Any]] | None = None
    hyperparameters: dict[str, Any] | None = None
    source: str | None = "trainer"
    library_name: str | None = "transformers"
    model_class: str | None = None
    samples: dict[str, int] | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _check_dataset_metadata(self)

    @classmethod
    def from_trainer(
        cls,
        trainer: Trainer,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset_metadata: dict[str, Any] | list[dict[str, Any]] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: Any = None,
    ) -> TrainingSummary:
        """The summary of a run. The arguments are the class's attributes; their defaults come from the Trainer.

        The default licence is the pretrained model's on the Hub. It is omitted in offline mode, or if the Hub does not
        answer within five seconds.

        Raises:
            InvalidArgument: for values of a wrong type.
        """
        model, folder = trainer._hftrainer.unwrapped_model, Path(str(trainer.args.output_dir))
        finetuned_from = finetuned_from or card_contents.base_model_of(model)
        best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
        summary = cls(
            model_name=model_name or folder.name or finetuned_from or folder.resolve().name,
            language=language,
            license=license,
            tags=tags,
            finetuned_from=finetuned_from,
            tasks=tasks or card_contents.task_of(model),
            dataset=dataset,
            dataset_tags=dataset_tags,
            dataset_args=dataset_args,
            dataset_metadata=dataset_metadata,
            eval_results=card_contents.final_results(trainer.state.log_history, best),
            eval_lines=card_contents.evaluation_rows(trainer.state.log_history),
            hyperparameters=card_contents.hyperparameters(trainer._hftrainer),
            library_name=libraries.library_of(model),
            model_class=type(libraries.unwrap_peft(model)).__name__.removeprefix("FSDP"),
            samples=_count_samples(trainer),
        )
        summary.tags = list(dict.fromkeys([*_as_list(tags), GENERATED]))
        summary._fill_in_datasets(trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset)
        if license is None and (base := summary._base_model()):
            summary.license = card_contents.license_of(base)
        return summary

    def _fill_in_datasets(self, dataset: Any) -> None:
        """Describe the datasets of the run, unless the user described them."""
        if datasets := card_contents.datasets_of(dataset):
            if self.dataset_metadata is None:
                self.dataset_metadata = [{"config": source.config, "split": source.split} for source in datasets]
            if self.dataset_tags is None:
                self.dataset_tags = [source.tag for source in datasets]
            if self.dataset_args is None:
                self.dataset_args = [source.config for source in datasets]
        if self.dataset is None:
            self.dataset = self.dataset_tags

    def create_model_index(self, metric_mapping: dict[str, str]) -> list[dict[str, Any]]:
        """The Hub's `model-index`: the results for each task and dataset.

        Args:
            metric_mapping: tag → title, for the results to include.
        """
        from huggingface_hub.repocard_data import eval_results_to_model_index

        return eval_results_to_model_index(self.model_name, list(self._eval_results(metric_mapping)))

    def _eval_results(self, metrics: dict[str, str]) -> Iterator[EvalResult]:
        """Each metric for each task and dataset, without infinite and NaN values, which the Hub rejects."""
        from huggingface_hub import EvalResult

        columns = (self.dataset_tags, self.dataset, self.dataset_args, self.dataset_metadata)
        datasets = list(zip_longest(*map(_as_list, columns)))[: len(_as_list(self.dataset_tags))]
        for task in _as_list(self.tasks):
            for tag, name, arguments, metadata in datasets:
                for metric, title in metrics.items():
                    value = (self.eval_results or {})[title]
                    if isinstance(value, float) and not math.isfinite(value):
                        continue
                    yield EvalResult(
                        task_type=task,
                        task_name=card_contents.task_name(task),
                        dataset_type=tag,
                        dataset_name=name or tag,
                        dataset_args=arguments,
                        **{f"dataset_{key}": entry for key, entry in (metadata or {}).items()},
                        metric_type=metric,
                        metric_name=title,
                        metric_value=value,
                    )

    def create_metadata(self) -> dict[str, Any]:
        """The metadata at the top of the card, which the Hub's search uses."""
        return dict(self._card_data().to_dict())

    def _card_data(self) -> ModelCardData:
        from huggingface_hub import ModelCardData

        metrics = card_contents.metric_tags(self.eval_results or {})
        return ModelCardData(
            base_model=self._base_model(),
            datasets=_as_list(self.dataset_tags) or None,
            eval_results=list(self._eval_results(metrics)),
            language=_as_list(self.language) or None,
            library_name=self.library_name,
            license=self.license,
            metrics=list(metrics) or None,
            model_name=self.model_name,
            tags=_as_list(self.tags) or None,
        )

    def to_model_card(self) -> str:
        """The text of the card: metadata in YAML, then Markdown."""
        parts = [f"---\n{self._card_data().to_yaml()}\n---", *([_COMMENT] if self.source == "trainer" else [])]
        parts += [f"# {self.model_name}", self._introduction()]
        if self.eval_results:
            parts += ["Results on the evaluation set:", _bullets(self.eval_results)]
        parts += ["## Model description", _TO_BE_WRITTEN, "## Intended uses & limitations", _TO_BE_WRITTEN]
        parts += [
            "## Training and evaluation data",
            _bullets({name: count_of(n, "samples") for name, n in (self.samples or {}).items()}) or _TO_BE_WRITTEN,
        ]
        parts += ["## Training procedure", "### Training hyperparameters"]
        parts += [_bullets(self.hyperparameters) or _TO_BE_WRITTEN]
        if self.eval_lines or self.plot:
            parts += ["### Training results"]
            parts += [f"![The curves of the training run]({self.plot})"] if self.plot else []
            parts += [card_contents.markdown_table(self.eval_lines)] if self.eval_lines else []
        parts += ["### Framework versions", "\n".join(f"- {name} {version}" for name, version in _versions().items())]
        return "\n\n".join(parts) + "\n"

    def _base_model(self) -> str | None:
        """The pretrained model, if it is a valid repository name; the Hub rejects other names."""
        return self.finetuned_from if self.finetuned_from and card_contents.is_repo_id(self.finetuned_from) else None

    def _introduction(self) -> str:
        text = "An adapter for a model" if self.library_name == "peft" else "A model"
        if self.model_class:
            text += f" of class `{self.model_class}`"
        if base := self.finetuned_from:
            link = f"[{base}](https://huggingface.co/{base})" if self._base_model() else f"`{base}`"
            text += f", fine-tuned from {link}"
        else:
            text += ", trained"
        if names := _as_list(self.dataset):
            first = ", ".join(names[:-1])
            text += f" on {first} and {names[-1]}" if first else f" on {names[-1]}"
        return f"{text}."


def create_model_card(trainer: Trainer, tags: str | list[str] | None = None, **kwargs: Any) -> None:
    """Write the card of a run and a plot of its metrics to the output folder, in the main process.

    The card replaces an existing card, but keeps its tags and those of the model.

    Args:
        trainer: the Trainer.
        tags: tags in addition to `generated_from_trainer`.
        kwargs: the other arguments of `TrainingSummary.from_trainer`.

    Raises:
        InvalidArgument: for values of a wrong type.
    """
    if not trainer.is_world_process_zero():
        return
    folder, model = Path(str(trainer.args.output_dir)), trainer._hftrainer.unwrapped_model
    summary = TrainingSummary.from_trainer(trainer, tags=tags, **kwargs)
    existing_tags = [*(getattr(model, "model_tags", None) or []), *read_tags(folder / CARD_NAME)]
    summary.tags = list(dict.fromkeys([*_as_list(tags), *existing_tags, GENERATED]))
    folder.mkdir(parents=True, exist_ok=True)
    summary.plot = draw_plot(trainer.state, folder, force=not trainer.is_in_train)
    card = summary.to_model_card()
    if summary.library_name == "peft":
        card = add_peft_parts(card, model)
    write_file_atomically(str(folder / CARD_NAME), lambda path: Path(path).write_text(card, encoding="utf-8"))
    trainer._hftrainer.storage_sync.upload_files()


# ---- The tags of an earlier card, the plot of the run, and PEFT's parts of a card ------------------------------------


def read_tags(path: Path) -> list[str]:
    """The tags of an existing card; empty if there is no card."""
    import yaml
    from huggingface_hub import metadata_load

    if not path.is_file():
        return []
    try:
        tags = (metadata_load(path) or {}).get("tags") or []
    except (ValueError, yaml.YAMLError) as error:
        logger.warning("The metadata of %s cannot be read, so its tags are not kept: %s", path, error)
        return []
    return [tag for tag in ([tags] if isinstance(tags, str) else tags) if isinstance(tag, str)]


def draw_plot(state: TrainerState, folder: Path, *, force: bool) -> str | None:
    """Plot the metrics of a run.

    Args:
        state: the state of the run, with its log history.
        folder: the folder for the plot.
        force: draw even if a recent plot exists.

    Returns:
        The file name of the plot; None if there is nothing to plot, or matplotlib is not installed.
    """
    path = folder / PLOT_NAME
    if not force and path.exists() and time.time() - path.stat().st_mtime < _SECONDS_BETWEEN_PLOTS:
        return PLOT_NAME
    lines = curves_of_run(state)
    if not any(len(line.steps) > 1 for line in lines):
        return None
    try:
        write_file_atomically(str(path), functools.partial(draw_picture, lines, title=folder.name))
    except MissingPackage as error:
        log_once(logger, f"The model card has no plot of the training run. {error}", logging.INFO)
        return None
    return PLOT_NAME


def add_peft_parts(card: str, model: Any) -> str:
    """Add PEFT's parts to a card, and restore the tags and the base model that PEFT removes."""
    from huggingface_hub import ModelCard

    old_data: Any = ModelCard(card).data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CARD_NAME
        path.write_text(card, encoding="utf-8")
        try:
            model.create_or_update_model_card(folder)
        # Models with mixed adapter types raise this.
        except NotImplementedError:
            return card
        new_card = ModelCard.load(path)
    data: Any = new_card.data
    # PEFT's tag for the base model is invalid if the model was loaded from a folder, or has no name.
    data.tags = [
        tag
        for tag in dict.fromkeys([*old_data.tags, *data.tags])
        if not tag.startswith(_ADAPTER_OF) or card_contents.is_repo_id(tag.removeprefix(_ADAPTER_OF))
    ]
    data.base_model = old_data.base_model
    return f"{new_card}\n"


# ---- Values ----------------------------------------------------------------------------------------------------------


def _check_types(summary: TrainingSummary) -> None:
    for name in ("model_name", "license", "finetuned_from"):
        if not isinstance(value := getattr(summary, name), (str, type(None))):
            raise InvalidArgument(f"{name}={value!r}: pass a string.")
    for name in ("language", "tags", "tasks", "dataset", "dataset_tags"):
        value = getattr(summary, name)
        if not isinstance(value, (str, list, tuple, type(None))) or not all(isinstance(v, str) for v in value or ()):
            raise InvalidArgument(f"{name}={value!r}: pass a string or a list of strings.")


def _check_dataset_metadata(summary: TrainingSummary) -> None:
    tags = _as_list(summary.dataset_tags)
    for name in ("dataset_args", "dataset_metadata"):
        if tags and len(values := _as_list(getattr(summary, name))) > len(tags):
            raise InvalidArgument(f"{name}={values!r}: more values than dataset_tags={tags!r}. Pass one value per tag.")
    for metadata in _as_list(summary.dataset_metadata):
        if not isinstance(metadata, dict):
            raise InvalidArgument(f"dataset_metadata={metadata!r}: pass a dict or a list of dicts.")
        for key in metadata:
            if key not in _DATASET_METADATA:
                hint = suggest(key, _DATASET_METADATA, f"; allowed keys: {', '.join(_DATASET_METADATA)}.")
                raise InvalidArgument(f"dataset_metadata does not allow the key {key!r}{hint}")


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _bullets(values: dict[str, Any] | None) -> str:
    return "\n".join(f"- {name}: {card_contents.format_value(value)}" for name, value in (values or {}).items())


def _count_samples(trainer: Trainer) -> dict[str, int]:
    datasets = {"training": trainer.train_dataset}
    if isinstance(trainer.eval_dataset, dict):
        datasets |= {f"evaluation, {name}": data for name, data in trainer.eval_dataset.items()}
    else:
        datasets["evaluation"] = trainer.eval_dataset
    return {name: len(data) for name, data in datasets.items() if data is not None and libraries.has_length(data)}


def _versions() -> dict[str, str]:
    """The versions of the imported libraries; PEFT adds its version itself."""
    versions = {name: sys.modules[key].__version__ for key, name in _FRAMEWORKS.items() if sys.modules.get(key)}
    return {"hftrainer": __version__, **versions}
