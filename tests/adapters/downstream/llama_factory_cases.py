"""LLaMA-Factory's `run_exp`, as its command line calls it: trained with evaluations and saves, saved, and resumed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llamafactory.train.tuner import run_exp
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.adapters.downstream import full_run, records
from tests.adapters.downstream.tiny_language import save_model, sentence

SETTINGS = {
    **full_run.SETTINGS,
    **{"template": "empty", "do_train": True, "do_eval": True, "cutoff_len": 32},
    **dict.fromkeys(("fp16", "bf16", "save_only_model"), False),
    "disable_tqdm": False,  # the other callback takes total_flos out of what is written
}
#: Format of a data set → its rows, and what dataset_info.json says of it.
ROWS: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any]]] = {
    "answered": (lambda index: {"instruction": sentence(index), "input": "", "output": sentence(index + 50, 4)}, {}),
    "texts": (lambda index: {"text": sentence(index, 12)}, {"columns": {"prompt": "text"}}),
    "compared": (
        lambda i: {"instruction": sentence(i), "chosen": sentence(i + 50, 4), "rejected": sentence(i, 3)},
        {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
    ),
    "judged": (
        lambda index: {"instruction": sentence(index), "output": sentence(index + 50, 4), "good": index % 2 == 0},
        {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "good"}},
    ),
}


class Witness(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state = state


def save_data(kind: str) -> None:
    row, described = ROWS[kind]
    folder = Path("data")
    folder.mkdir()
    for name, first, end in (("train", 0, 40), ("held_out", 40, 46)):
        lines = (json.dumps(row(index)) + "\n" for index in range(first, end))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    info = {name: {"file_name": f"{name}.jsonl", **described} for name in ("train", "held_out")}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def live(folder: Path, data: str, resumes: bool = True, **settings: Any) -> dict[str, Any]:
    save_data(data)
    given = {"model_name_or_path": save_model(Path("model")), "dataset_dir": "data"}
    given |= {"dataset": "train", "eval_dataset": "held_out"} | SETTINGS | settings
    logs, lives_of = {}, {"run": {}, "resumed": {"resume_from_checkpoint": str(folder / "run" / "checkpoint-3")}}
    for name, more in list(lives_of.items())[: 1 + resumes]:
        witness = Witness()
        run_exp({**given, "output_dir": str(folder / name), **more}, callbacks=[witness])
        logs[name] = records.plain(witness.state.log_history)
    found = {name: content for name, content in records.files(folder).items() if not name.endswith("training.png")}
    for name in found:
        if name.endswith("trainer_log.jsonl"):  # with measured times
            found[name] = "by name"
    weights = load_file(next((folder / "run").glob("*.safetensors")))
    return {
        "log_history": logs["run"],
        "resumed": logs.get("resumed"),
        "weights": {name: records.digest(tensor) for name, tensor in weights.items()},
        "files": found,
    }


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "sft": partial(live, data="answered", stage="sft", finetuning_type="full"),
    "sft_lora_best_at_end": partial(
        live, data="answered", stage="sft", finetuning_type="lora", lora_rank=2, load_best_model_at_end=True
    ),
    "pretrain": partial(live, data="texts", stage="pt", finetuning_type="full"),
    "dpo": partial(live, data="compared", stage="dpo", finetuning_type="lora", lora_rank=2),
    "kto": partial(live, data="judged", stage="kto", finetuning_type="lora", lora_rank=2),
    "reward": partial(live, data="compared", stage="rm", finetuning_type="lora", resumes=False),
}
