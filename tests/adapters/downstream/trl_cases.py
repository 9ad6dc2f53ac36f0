"""Trainers of TRL: each is trained with evaluations and saves, evaluated, saved, and resumed by a new one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from peft import LoraConfig

from tests.adapters.downstream import full_run, records
from tests.adapters.downstream.tiny_language import assistant, save_model, sentence, user

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
SETTINGS = {**full_run.SETTINGS, "bf16": False}  # which TRL turns on


def live(
    folder: Path,
    kind: str,
    data: Callable[[int], dict[str, Any]],
    *,
    streaming: bool = False,
    objects: Callable[[], dict[str, Any]] = dict,
    **settings: Any,
) -> dict[str, Any]:
    """The record of a Trainer's life; `kind` begins its name and its config's, `data` makes a row of its number."""
    model = save_model(Path("model"), labels=1 if kind == "Reward" else None)
    trainer_class, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    train, held_out = (Dataset.from_list([data(index) for index in range(*rows)]) for rows in ((40,), (40, 46)))

    def build(name: str) -> Any:
        return trainer_class(
            model,
            args=config(str(folder / name), **{**SETTINGS, **settings}),
            train_dataset=train.to_iterable_dataset(num_shards=2) if streaming else train,
            eval_dataset=held_out,
            **objects(),
        )

    trainer = build("run")
    output = trainer.train()
    metrics, predictions = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
    trainer.save_model(str(folder / "final"))
    resumed = build("resumed")
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    again = {"log_history": resumed.state.log_history, "weights": records.weights(resumed.model)}
    output.metrics.pop("total_flos", None)  # transformers' PrinterCallback removes it
    return records.of(trainer, folder, metrics=metrics, predictions=predictions, output=output.metrics, resumed=again)


def lora(task: str = "CAUSAL_LM") -> dict[str, Any]:
    return {"peft_config": LoraConfig(task_type=task, **LORA)}


def text(index: int) -> dict[str, Any]:
    return {"text": sentence(index, 4 + index % 9)}


def completion(index: int) -> dict[str, Any]:
    return {"prompt": sentence(index), "completion": " " + sentence(index + 50, 3 + index % 4)}


def conversation(index: int) -> dict[str, Any]:
    return {"messages": user(index) + assistant(index) + user(index + 7) + assistant(index + 9)}


def answers(index: int) -> dict[str, Any]:
    return {"prompt": user(index), "chosen": assistant(index), "rejected": assistant(index + 11)}


def judged(index: int) -> dict[str, Any]:
    return {"prompt": sentence(index), "completion": " " + sentence(index + 50), "label": index % 3 != 0}


def question(index: int) -> dict[str, Any]:
    return {"prompt": user(index), "wanted": sentence(index).split()[0]}


def says_wanted(completions: list, wanted: list[str], **kwargs: Any) -> list[float]:
    said = [answer[0]["content"] for answer in completions]
    return [words.count(word) + 0.01 * len(words) for words, word in zip(said, wanted, strict=True)]


def short(completions: list, **kwargs: Any) -> list[float]:
    return [-0.1 * len(answer[0]["content"].split()) for answer in completions]


#: Four answers to a question, short ones; a batch of all questions' answers is made every other step.
ONLINE = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 4}
ONLINE |= {"max_completion_length": 8, "max_steps": 4, "save_steps": 3, "eval_steps": 4, "beta": 0.1}


def rewards() -> dict[str, Any]:
    return {"reward_funcs": [says_wanted, short]}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "sft_text": partial(live, kind="SFT", data=text),
    "sft_text_in_bf16": partial(live, kind="SFT", data=text, bf16=True, max_grad_norm=0.1),
    "sft_completion": partial(live, kind="SFT", data=completion),
    "sft_conversation": partial(live, kind="SFT", data=conversation, assistant_only_loss=True),
    "sft_packing": partial(
        live, kind="SFT", data=text, packing=True, packing_strategy="wrapped", max_length=16, eval_packing=False
    ),
    "sft_streaming": partial(live, kind="SFT", data=text, streaming=True),
    "sft_lora": partial(live, kind="SFT", data=text, objects=lora),
    "sft_lora_streaming": partial(live, kind="SFT", data=completion, objects=lora, streaming=True),
    "dpo": partial(live, kind="DPO", data=answers),
    "dpo_precomputed": partial(live, kind="DPO", data=answers, precompute_ref_log_probs=True),
    "dpo_synced_reference": partial(live, kind="DPO", data=answers, sync_ref_model=True, ref_model_sync_steps=2),
    "dpo_lora": partial(live, kind="DPO", data=answers, objects=lora),
    "reward": partial(live, kind="Reward", data=answers),
    "reward_lora": partial(live, kind="Reward", data=answers, objects=partial(lora, "SEQ_CLS")),
    "kto": partial(live, kind="KTO", data=judged),
    "kto_lora": partial(live, kind="KTO", data=judged, objects=lora),
    "grpo": partial(live, kind="GRPO", data=question, objects=rewards, **ONLINE),
    "grpo_two_iterations": partial(live, kind="GRPO", data=question, objects=rewards, num_iterations=2, **ONLINE),
    "grpo_lora": partial(live, kind="GRPO", data=question, objects=lambda: {**rewards(), **lora()}, **ONLINE),
    "rloo": partial(live, kind="RLOO", data=question, objects=rewards, **ONLINE),
}
