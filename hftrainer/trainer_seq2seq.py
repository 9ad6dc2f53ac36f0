"""`Seq2SeqTrainer`: evaluation and prediction with `generate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrainer.base.tracebacks import describe_type
from hftrainer.compat.overrides import record_methods
from hftrainer.errors import InvalidArgument, WrongObject
from hftrainer.evaluation.collecting import make_full_gather
from hftrainer.model.inspection import extract_loss
from hftrainer.trainer import Trainer
from hftrainer.trainer_utils import PredictionOutput


@record_methods
class Seq2SeqTrainer(Trainer):
    """A `Trainer` that can predict with `model.generate`.

    Args:
        args: `Seq2SeqTrainingArguments`, whose `generation_config` replaces the model's.
        kwargs: the other arguments of `Trainer`.
    """

    def __init__(self, model: nn.Module | None = None, args: Any = None, *positional: Any, **kwargs: Any) -> None:
        super().__init__(model, args, *positional, **kwargs)
        if not hasattr(self.args, "predict_with_generate"):
            raise WrongObject(
                f"args is {describe_type(self.args)}, which has no arguments for generation: pass "
                "Seq2SeqTrainingArguments."
            )
        self._gen_kwargs: dict[str, Any] = {}
        if (config := getattr(self.args, "generation_config", None)) is not None:
            self.model.generation_config = self.load_generation_config(config)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """A copy of a generation config, or a config loaded from a file, a folder or a model id.

        Raises:
            InvalidArgument: if it cannot be saved with the model; the error has transformers' reasons.
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

        Other arguments go to `model.generate`; scripts for v4.15 pass the first two by position.
        """
        # The loss counts an incomplete last batch as full.
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
        """The loss, generated tokens of shape `(batch, length)`, and labels, padded to the maximum length."""
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
        """Tokens of shape `(batch, length)`, padded on the right to `(batch, max_length)`.

        Raises:
            InvalidArgument: if neither the tokenizer nor the model has a padding token.
        """
        tokenizer, config = self.processing_class, getattr(self.model, "config", None)
        if tokenizer is not None and hasattr(tokenizer, "pad_token_id"):
            pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        else:
            pad_token_id = getattr(config, "pad_token_id", None)
        if pad_token_id is None:
            raise InvalidArgument("Generated sequences cannot be padded: set model.config.pad_token_id.")
        return nn.functional.pad(tensor, (0, max_length - tensor.shape[-1]), value=pad_token_id)


#: Arguments of `generate` for which None selects the value in the model's config.
_OPTIONAL_ARGUMENTS = ("num_beams", "max_length")


def _complete_gen_kwargs(args: Any, **gen_kwargs: Any) -> dict[str, Any]:
    """The arguments of `generate`, completed from the training arguments."""
    kwargs = dict(gen_kwargs)
    needs_length = kwargs.get("max_length") is None and kwargs.get("max_new_tokens") is None
    if needs_length and args.generation_max_length is not None:
        kwargs["max_length"] = args.generation_max_length
    if kwargs.get("num_beams") is None and args.generation_num_beams is not None:
        kwargs["num_beams"] = args.generation_num_beams
    return kwargs


def _generate(trainer: Seq2SeqTrainer, inputs: dict[str, Any], gen_kwargs: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The generated tokens, and the length that sequences are padded to."""
    model: Any = trainer._hftrainer.unwrapped_model
    kwargs = {name: value for name, value in gen_kwargs.items() if value is not None or name not in _OPTIONAL_ARGUMENTS}
    strategy = trainer._hftrainer.strategy
    # If ranks have shards of the model, all must run until the longest sequence is complete.
    kwargs.setdefault("synced_gpus", strategy.needs_all_ranks_in_forward)
    labels, decoder_inputs = inputs.get("labels"), inputs.get("decoder_input_ids")
    # The decoder inputs were made from the labels.
    has_shifted_labels = labels is not None and decoder_inputs is not None and labels.shape == decoder_inputs.shape
    excluded = ("decoder_input_ids", "decoder_attention_mask") if has_shifted_labels else ()
    with strategy.summon_full_parameters():
        tokens = model.generate(**{name: value for name, value in inputs.items() if name not in excluded}, **kwargs)
    config = model.generation_config
    # Otherwise each batch would rebuild the config.
    config._from_model_config = False
    # v5 stores the defaults separately.
    if hasattr(config, "_get_default_generation_params"):
        config.update(**config._get_default_generation_params(), defaults_only=True)
    if tokens.shape[-1] < config.max_length or config.max_new_tokens is None:
        return tokens, config.max_length
    return tokens, config.max_new_tokens + 1


def _pad(trainer: Seq2SeqTrainer, tokens: torch.Tensor, length: int) -> torch.Tensor:
    return trainer._pad_tensors_to_max_len(tokens, length) if tokens.shape[-1] < length else tokens
