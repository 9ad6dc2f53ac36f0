"""PEFT's adapters in a plain Trainer: each trained with evaluations and saves, saved, resumed, and merged."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.adapters.downstream import full_run, records
from tests.adapters.downstream.tiny_language import save_model, sentence, tokenizer

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def texts(first: int, end: int) -> Dataset:
    words = tokenizer()
    return Dataset.from_list([dict(words(sentence(index, 4 + index % 9))) for index in range(first, end)])


def labelled(first: int, end: int) -> Dataset:
    words = tokenizer()
    return Dataset.from_list([{**words(sentence(index)), "label": index % 3} for index in range(first, end)])


def base(task: str) -> Any:
    folder = Path("model")
    if not folder.exists():
        save_model(folder, labels=3 if task == "SEQ_CLS" else None)
    kind = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
    return kind.from_pretrained(folder)


def outputs_of(model: Any) -> str:
    model.eval()
    with torch.no_grad():
        return records.digest(model(**tokenizer()(sentence(1), return_tensors="pt")).logits)


class Allocate(TrainerCallback):
    """What AdaLoRA's users do after the backward pass of each step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.base_model.update_and_allocate(state.global_step)


def live(
    folder: Path,
    config: Callable[[], Any],
    *,
    adapters: tuple[str, ...] = ("default",),
    optimizer: Callable[[Any], Any] | None = None,
    callbacks: tuple[type, ...] = (),
    merges: bool = False,
    resumes: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """The record of a Trainer's life, the adapter that is loaded again, and the merged model.

    The last of `adapters` is trained. PEFT cannot merge all kinds into a model, nor load all kinds into fresh ones.
    """
    task = config().task_type
    data, collator = texts, DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    if task == "SEQ_CLS":
        data, collator = labelled, DataCollatorWithPadding(tokenizer())
    trainers = []

    def build(name: str) -> Trainer:
        torch.manual_seed(1)
        model = get_peft_model(base(task), config(), adapter_name=adapters[0])
        for more in adapters[1:]:
            model.add_adapter(more, config())
        model.set_adapter(adapters[-1])
        args = TrainingArguments(str(folder / name), **{**full_run.SETTINGS, **settings})
        trainer_kwargs = {} if optimizer is None else {"optimizers": (optimizer(model), None)}
        trainers.append(
            Trainer(
                model,
                args,
                train_dataset=data(0, 40),
                eval_dataset=data(40, 46),
                data_collator=collator,
                callbacks=[callback() for callback in callbacks],
                **trainer_kwargs,
            )
        )
        return trainers[-1]

    record = full_run.record(build, folder, resumes=resumes)
    saved = folder / "final" / ("" if adapters[-1] == "default" else adapters[-1])
    record["loaded"] = outputs_of(PeftModel.from_pretrained(base(task), str(saved)))
    record["flags"] = [name for name, weight in trainers[0].model.named_parameters() if weight.requires_grad]
    if merges:
        record["merged"] = outputs_of(trainers[0].model.merge_and_unload())
    return record


def lora(task_type: str = "CAUSAL_LM", **more: Any) -> LoraConfig:
    return LoraConfig(task_type=task_type, **{**LORA, **more})


def plus(model: Any) -> Any:
    """LoRA+: larger steps for one of both matrices."""
    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)


DOWN = "down_proj"
lora_live = partial(live, merges=True)
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "lora": partial(lora_live, config=lora),
    "lora_gradient_checkpointing": partial(lora_live, config=lora, gradient_checkpointing=True),
    "lora_classifier": partial(lora_live, config=partial(lora, "SEQ_CLS"), load_best_model_at_end=True),
    "lora_two_adapters": partial(lora_live, config=lora, adapters=("default", "second")),
    "lora_plus": partial(lora_live, config=lora, optimizer=plus),
    "dora": partial(lora_live, config=partial(lora, use_dora=True)),
    "trained_tokens": partial(lora_live, config=partial(lora, trainable_token_indices=[5, 6])),
    "adalora": partial(
        live,
        config=lambda: AdaLoraConfig(
            **{"task_type": "CAUSAL_LM", "init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1},
            **{"total_step": 6, "target_modules": ["q_proj"]},
        ),
        callbacks=(Allocate,),
        resumes=False,
    ),
    "ia3": partial(
        live,
        config=lambda: IA3Config("CAUSAL_LM", target_modules=["k_proj", DOWN], feedforward_modules=[DOWN]),
        merges=True,
    ),
    "prompt_tuning": partial(live, config=lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "prefix_tuning": partial(live, config=lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
}
