"""`Seq2SeqTrainer`: evaluation and prediction with `generate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrainer.compat.overrides import recorded
from hftrainer.errors import InvalidArgument, WrongObject
from hftrainer.evaluation.collected import make_full_gather
from hftrainer.trainer import Trainer
from hftrainer.trainer_utils import PredictionOutput
from hftrainer.training.steps import extract_loss


@recorded
class Seq2SeqTrainer(Trainer):
    """A `Trainer` that can predict with `model.generate`; takes `Seq2SeqTrainingArguments`.

    Args:
        args: the settings. `generation_config` replaces the model's generation config.
        kwargs: everything else, as for `Trainer`.
    """

    def __init__(self, model: nn.Module | None = None, args: Any = None, *positional: Any, **kwargs: Any) -> None:
        super().__init__(model, args, *positional, **kwargs)
        if not hasattr(self.args, "predict_with_generate"):
            raise WrongObject(
                f"args is a {type(self.args).__name__}, which has no arguments for generation: pass "
                "Seq2SeqTrainingArguments."
            )
        self._gen_kwargs: dict[str, Any] = {}
        given = getattr(self.args, "generation_config", None)
        if given is not None:
            self.model.generation_config = self.load_generation_config(given)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """The generation config for an argument: the argument itself, or loaded from a file, a folder or a model id.

        Raises:
            InvalidArgument: when it cannot be saved with the model; the error has transformers' reasons.
        """
        from transformers import GenerationConfig

        if isinstance(gen_config_arg, GenerationConfig):
            config = copy.deepcopy(gen_config_arg)
        elif (path := Path(gen_config_arg)).is_file():
            config = GenerationConfig.from_pretrained(path.parent, path.name)
        else:
            config = GenerationConfig.from_pretrained(gen_config_arg)
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise InvalidArgument(
                f"generation_config cannot be saved with the model: {error} Fix these issues to train your model."
            ) from error
        return config

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        max_length: int | None = None,
        num_beams: int | None = None,
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does.

        Other arguments go to `model.generate`; v4.15 took the first two by position.
        """
        # An incomplete last batch counts as a full one.
        self.gather_function = make_full_gather(self.accelerator, self.args)
        self._gen_kwargs = _complete_gen_kwargs(self.args, max_length=max_length, num_beams=num_beams, **gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        max_length: int | None = None,
        num_beams: int | None = None,
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict as `Trainer.predict` does; other arguments go to `model.generate`."""
        self.gather_function = make_full_gather(self.accelerator, self.args)
        self._gen_kwargs = _complete_gen_kwargs(self.args, max_length=max_length, num_beams=num_beams, **gen_kwargs)
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, generated tokens of shape `(batch, length)` and labels, padded to the longest allowed length."""
        if not self.args.predict_with_generate or prediction_loss_only:  # type: ignore[attr-defined]
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        tokens, length = _generate(self, inputs, gen_kwargs or self._gen_kwargs)
        labels, loss = inputs.get("labels"), None
        if labels is not None:
            with torch.no_grad(), self.compute_loss_context_manager():
                outputs = model(**inputs)
            smoother = self.label_smoother
            loss = extract_loss(outputs, inputs) if smoother is None else smoother(outputs, labels)
            loss = loss.detach().mean()
        if self.args.prediction_loss_only:
            return loss, None, None
        return loss, _pad(self, tokens, length), None if labels is None else _pad(self, labels, length)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """`(batch, length)` tokens, padded on the right to `(batch, max_length)`.

        Raises:
            InvalidArgument: when neither tokenizer nor model has a padding token.
        """
        tokenizer, config = self.processing_class, getattr(self.model, "config", None)
        if tokenizer is not None and hasattr(tokenizer, "pad_token_id"):
            pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        else:
            pad = getattr(config, "pad_token_id", None)
        if pad is None:
            raise InvalidArgument("Generated sequences cannot be padded: set model.config.pad_token_id.")
        return nn.functional.pad(tensor, (0, max_length - tensor.shape[-1]), value=pad)


#: Keywords of `generate` for which None means the value of the model's config.
_OPTIONAL = ("num_beams", "max_length")


def _complete_gen_kwargs(args: Any, **gen_kwargs: Any) -> dict[str, Any]:
    """The keywords of `generate`, completed from the training arguments."""
    completed = dict(gen_kwargs)
    unlimited = completed.get("max_length") is None and completed.get("max_new_tokens") is None
    if unlimited and args.generation_max_length is not None:
        completed["max_length"] = args.generation_max_length
    if completed.get("num_beams") is None and args.generation_num_beams is not None:
        completed["num_beams"] = args.generation_num_beams
    return completed


def _generate(trainer: Seq2SeqTrainer, inputs: dict[str, Any], gen_kwargs: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The generated tokens, and the length that sequences are padded to."""
    model: Any = trainer._hftrainer.unwrapped_model
    wanted = {name: value for name, value in gen_kwargs.items() if value is not None or name not in _OPTIONAL}
    strategy = trainer._hftrainer.strategy
    # Ranks with shards of the model must all run until the longest sequence is complete.
    wanted.setdefault("synced_gpus", strategy.needs_all_ranks_in_forward)
    labels, decoded = inputs.get("labels"), inputs.get("decoder_input_ids")
    made_of_labels = labels is not None and decoded is not None and labels.shape == decoded.shape
    hidden = ("decoder_input_ids", "decoder_attention_mask") if made_of_labels else ()
    with strategy.summon_full_parameters():
        tokens = model.generate(**{name: value for name, value in inputs.items() if name not in hidden}, **wanted)
    config = model.generation_config
    config._from_model_config = False  # else each batch would rebuild the config
    if hasattr(config, "_get_default_generation_params"):  # v5 stores the defaults separately
        config.update(**config._get_default_generation_params(), defaults_only=True)
    if tokens.shape[-1] < config.max_length or config.max_new_tokens is None:
        return tokens, config.max_length
    return tokens, config.max_new_tokens + 1


def _pad(trainer: Seq2SeqTrainer, tokens: torch.Tensor, length: int) -> torch.Tensor:
    return trainer._pad_tensors_to_max_len(tokens, length) if tokens.shape[-1] < length else tokens
