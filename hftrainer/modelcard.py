"""Model cards: the `README.md` that tells others what a model is and how it was trained."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.compat import peers
from hftrainer.compat.functions import has_length
from hftrainer.compat.version import __version__
from hftrainer.errors import InvalidArgument
from hftrainer.model_card import origins
from hftrainer.model_card.files import CARD_NAME, completed_by_peft, draw, tags_in
from hftrainer.model_card.hyperparameters import hyperparameters
from hftrainer.model_card.results import final_results, markdown_table, metric_tags, shown, table
from hftrainer.reporting.metrics import write_whole

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

    from hftrainer.training.trainer_api import TrainerApi

GENERATED = "generated_from_trainer"
_COMMENT = (
    "<!-- The Trainer wrote this card from what it knows of the run. Complete it, then take this comment out. -->"
)
_TO_BE_WRITTEN = "_Not written yet._"
#: Module → what it is called in a card.
_FRAMEWORKS = {
    "lightning": "Lightning",
    "torch": "Pytorch",
    "transformers": "Transformers",
    "datasets": "Datasets",
    "tokenizers": "Tokenizers",
}
#: What the metadata of a dataset may hold besides its name, tag and arguments.
_DATASET_METADATA = ("config", "split", "revision")


@dataclass
class TrainingSummary:
    """What a model card says.

    Attributes:
        model_name: the heading, and the name in the model index.
        language: of the data, as ISO codes such as 'en'; the Hub checks them when the card is uploaded.
        license: an identifier that the Hub knows, such as 'apache-2.0'; the Hub checks it too.
        tags: what the model is found by.
        finetuned_from: the repository of the model that training began with.
        tasks: identifiers such as 'text-classification'.
        dataset: the names of the datasets; by default their tags.
        dataset_tags: their identifiers on the Hub.
        dataset_args: for each tag the arguments that it was loaded with.
        dataset_metadata: for each tag a dict with any of 'config', 'split' and 'revision'.
        eval_results: title → value, such as `{"Accuracy": 0.9}`.
        eval_lines: a row for each evaluation, as column → value.
        hyperparameters: name → value.
        source: 'trainer' says in a comment that the card was generated.
        library_name: the library that loads the model; None when there is none but torch.
        model_class: the name of the model's class.
        samples: name of a dataset → its number of samples.
        picture: path of the training curves, relative to the card.

    Raises:
        InvalidArgument: for values of another type, naming them.
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
    picture: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_trainer(
        cls,
        trainer: TrainerApi,
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
        """The summary of a run. What is not given is found out: see the attributes of the class.

        The licence is that of the model that training began with, which the Hub is asked for unless it is offline; a
        Hub that does not answer within five seconds leaves it out.

        Raises:
            InvalidArgument: for values of another type, naming them.
        """
        model = trainer._hftrainer.bare_model
        finetuned_from, folder = finetuned_from or origins.base_model_of(model), Path(str(trainer.args.output_dir))
        summary = cls(
            model_name=model_name or folder.name or finetuned_from or folder.resolve().name,
            language=language,
            license=license,
            tags=tags,
            finetuned_from=finetuned_from,
            tasks=tasks or origins.task_of(model),
            dataset=dataset,
            dataset_tags=dataset_tags,
            dataset_args=dataset_args,
            dataset_metadata=dataset_metadata,
            eval_results=final_results(trainer.state.log_history, _step_of_best(trainer)),
            eval_lines=table(trainer.state.log_history),
            hyperparameters=hyperparameters(trainer),
            library_name="peft" if peers.is_peft(model) else "transformers" if peers.is_pretrained(model) else None,
            model_class=type(peers.without_adapters(model)).__name__.removeprefix("FSDP"),
            samples=_count_samples(trainer),
        )
        summary.tags = list(dict.fromkeys([*_listed(tags), GENERATED]))
        summary._complete_datasets(trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset)
        if license is None and (base := summary._base_model()):
            summary.license = origins.license_of(base)
        return summary

    def _complete_datasets(self, dataset: Any) -> None:
        """Take what was not given of the datasets from those that were used, where these tell it."""
        if found := origins.datasets_of(dataset):
            if self.dataset_metadata is None:
                self.dataset_metadata = [{"config": one.config, "split": one.split} for one in found]
            if self.dataset_tags is None:
                self.dataset_tags = [one.tag for one in found]
            if self.dataset_args is None:
                self.dataset_args = [one.config for one in found]
        if self.dataset is None:
            self.dataset = self.dataset_tags

    def create_model_index(self, metric_mapping: dict[str, str]) -> list[dict[str, Any]]:
        """The results as the Hub's `model-index`, for each task and dataset.

        Args:
            metric_mapping: tag → title of the results that count.
        """
        from huggingface_hub.repocard_data import eval_results_to_model_index

        return eval_results_to_model_index(self.model_name, list(self._eval_results(metric_mapping)))

    def _eval_results(self, metrics: dict[str, str]) -> Iterator[EvalResult]:
        """Each metric for each task and dataset, without those that are no finite number, which the Hub refuses."""
        from huggingface_hub import EvalResult

        tags, names, args, metadata = (
            _listed(value) for value in (self.dataset_tags, self.dataset, self.dataset_args, self.dataset_metadata)
        )
        for task in _listed(self.tasks):
            for number, tag in enumerate(tags):
                for metric, title in metrics.items():
                    value = (self.eval_results or {})[title]
                    if isinstance(value, float) and not math.isfinite(value):
                        continue
                    yield EvalResult(
                        task_type=task,
                        task_name=origins.task_name(task),
                        dataset_type=tag,
                        dataset_name=_item(names, number) or tag,
                        dataset_args=_item(args, number),
                        **{f"dataset_{key}": given for key, given in (_item(metadata, number) or {}).items()},
                        metric_type=metric,
                        metric_name=title,
                        metric_value=value,
                    )

    def create_metadata(self) -> dict[str, Any]:
        """The head of the card: what the Hub sorts and searches by."""
        return self._card_data().to_dict()

    def _card_data(self) -> ModelCardData:
        from huggingface_hub import ModelCardData

        metrics = metric_tags(self.eval_results or {})
        return ModelCardData(
            base_model=self._base_model(),
            datasets=_listed(self.dataset_tags) or None,
            eval_results=list(self._eval_results(metrics)),
            language=_listed(self.language) or None,
            library_name=self.library_name,
            license=self.license,
            metrics=list(metrics) or None,
            model_name=self.model_name,
            tags=_listed(self.tags) or None,
        )

    def to_model_card(self) -> str:
        """The card, as Markdown below its metadata."""
        parts = [f"---\n{self._card_data().to_yaml()}\n---", *([_COMMENT] if self.source == "trainer" else [])]
        parts += [f"# {self.model_name}", self._introduction()]
        if self.eval_results:
            parts += ["Results on the evaluation set:", _bullets(self.eval_results)]
        parts += ["## Model description", _TO_BE_WRITTEN, "## Intended uses & limitations", _TO_BE_WRITTEN]
        parts += [
            "## Training and evaluation data",
            _bullets({name: f"{count} samples" for name, count in (self.samples or {}).items()}) or _TO_BE_WRITTEN,
        ]
        parts += ["## Training procedure", "### Training hyperparameters"]
        parts += [_bullets(self.hyperparameters) or _TO_BE_WRITTEN]
        if self.eval_lines or self.picture:
            parts += ["### Training results"]
            parts += [f"![The curves of the training run]({self.picture})"] if self.picture else []
            parts += [markdown_table(self.eval_lines)] if self.eval_lines else []
        parts += ["### Framework versions", "\n".join(f"- {name} {version}" for name, version in _versions().items())]
        return "\n\n".join(parts) + "\n"

    def _base_model(self) -> str | None:
        """What it was fine-tuned from, where others can find it; the Hub refuses a card with anything else."""
        return self.finetuned_from if self.finetuned_from and origins.is_repo_id(self.finetuned_from) else None

    def _introduction(self) -> str:
        model = f"{'An adapter for a' if self.library_name == 'peft' else 'A'} model"
        model += f" of class `{self.model_class}`" if self.model_class else ""
        how = "trained"
        if base := self.finetuned_from:
            link = f"[{base}](https://huggingface.co/{base})" if self._base_model() else f"`{base}`"
            how = f"fine-tuned from {link}"
        names = _listed(self.dataset)
        data = f" on {', '.join(names[:-1])}{' and ' if names[1:] else ''}{names[-1]}" if names else ""
        return f"{model}, {how}{data}."


def create_model_card(trainer: TrainerApi, tags: str | list[str] | None = None, **given: Any) -> None:
    """Write the card of a run into its output folder, with a picture of its curves; on the main process.

    The tags of the model and of a card that is there already are kept. What else stands in such a card is replaced.

    Args:
        trainer: the Trainer.
        tags: besides `generated_from_trainer`.
        given: the other keywords of `TrainingSummary.from_trainer`.

    Raises:
        InvalidArgument: for values of another type, naming them.
    """
    if not trainer.is_world_process_zero():
        return
    folder, model = Path(str(trainer.args.output_dir)), trainer._hftrainer.bare_model
    summary = TrainingSummary.from_trainer(trainer, tags=tags, **given)
    kept = [*(getattr(model, "model_tags", None) or []), *tags_in(folder / CARD_NAME)]
    summary.tags = list(dict.fromkeys([*_listed(tags), *kept, GENERATED]))
    folder.mkdir(parents=True, exist_ok=True)
    summary.picture = draw(trainer.state, folder, again=not trainer.is_in_train)
    card = summary.to_model_card()
    if summary.library_name == "peft":
        card = completed_by_peft(card, model)
    write_whole(str(folder / CARD_NAME), lambda path: Path(path).write_text(card, encoding="utf-8"))


def _check(summary: TrainingSummary) -> None:
    """Refuse what is of another type, and more values for datasets than there are datasets."""
    for name in ("model_name", "license", "finetuned_from"):
        if not isinstance(value := getattr(summary, name), (str, type(None))):
            raise InvalidArgument(f"{name}={value!r}: give a string.")
    for name in ("language", "tags", "tasks", "dataset", "dataset_tags"):
        value = getattr(summary, name)
        if not isinstance(value, (str, list, tuple, type(None))) or not all(isinstance(v, str) for v in value or ()):
            raise InvalidArgument(f"{name}={value!r}: give a string or a list of strings.")
    tags = _listed(summary.dataset_tags)
    for name in ("dataset_args", "dataset_metadata"):
        if tags and len(values := _listed(getattr(summary, name))) > len(tags):
            raise InvalidArgument(f"{name}={values!r}: there are more than dataset_tags={tags!r}.")
    for metadata in _listed(summary.dataset_metadata):
        if not isinstance(metadata, dict):
            raise InvalidArgument(f"dataset_metadata={metadata!r}: give a dict or a list of dicts.")
        for key in metadata:
            if key not in _DATASET_METADATA:
                near = difflib.get_close_matches(key, _DATASET_METADATA, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it may hold {', '.join(_DATASET_METADATA)}."
                raise InvalidArgument(f"dataset_metadata has no {key!r}{hint}")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _item(values: list[Any], number: int) -> Any:
    return values[number] if number < len(values) else None


def _bullets(values: dict[str, Any] | None) -> str:
    return "\n".join(f"- {name}: {shown(value)}" for name, value in (values or {}).items())


def _step_of_best(trainer: TrainerApi) -> int | None:
    return trainer.state.best_global_step if trainer.args.load_best_model_at_end else None


def _count_samples(trainer: TrainerApi) -> dict[str, int]:
    evaluation = trainer.eval_dataset
    several = {f"evaluation, {name}": one for name, one in evaluation.items()} if isinstance(evaluation, dict) else None
    data = {"training": trainer.train_dataset, **({"evaluation": evaluation} if several is None else several)}
    return {name: len(one) for name, one in data.items() if one is not None and has_length(one)}


def _versions() -> dict[str, str]:
    """The versions of what took part; PEFT adds its own. Libraries that nobody has imported did not."""
    found = {name: sys.modules[module].__version__ for module, name in _FRAMEWORKS.items() if sys.modules.get(module)}
    return {"hftrainer": __version__, **found}
