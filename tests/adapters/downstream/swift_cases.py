"""ms-swift's pipelines, whose Trainers are trained with evaluations and saves, saved, and resumed."""

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from swift.pipelines.train.pretrain import SwiftPretrain
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.pipelines.train.sft import SwiftSft

from hftrainer.arguments.fields.own import OwnArguments
from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_language import assistant, save_model, user

#: Words of every command line, and their values.
SETTINGS = {
    **full_run.SETTINGS,
    **{"model_type": "mistral", "template": "chatml", "torch_dtype": "float32"},
    **dict.fromkeys(("add_version", "disable_tqdm", "check_model"), "false"),
    "fp16": "false",  # which it takes for a model in float32, also on a CPU
    **{"dataset_num_proc": 1, "dataloader_num_workers": 0},
}
#: Of args.json: the arguments' own text, whose order is another, and what only ours has.
OWN_ARGUMENTS = {"training_args", "debug", *inspect.get_annotations(OwnArguments)}


def answered(index: int) -> dict[str, Any]:
    return {"messages": [*user(index), *assistant(index)]}


def compared(index: int) -> dict[str, Any]:
    return {**answered(index), "rejected_response": assistant(index + 5)[0]["content"]}


def save_rows(row: Callable[[int], dict[str, Any]], first: int, end: int, path: str) -> str:
    Path(path).write_text("".join(json.dumps(row(index)) + "\n" for index in range(first, end)))
    return path


def live(
    folder: Path, pipeline: type = SwiftSft, row: Callable[[int], dict[str, Any]] = answered, **settings: Any
) -> dict[str, Any]:
    given = {
        "model": save_model(Path("model")),
        "dataset": save_rows(row, 0, 40, "train.jsonl"),
        "val_dataset": save_rows(row, 40, 46, "held_out.jsonl"),
        **SETTINGS,
        **settings,
    }

    class Maker(pipeline):
        def train(self, trainer: Any) -> Any:
            return trainer

    def build(name: str) -> Any:
        words = {**given, "output_dir": str(folder / name)}
        return Maker([part for name, value in words.items() for part in (f"--{name}", str(value))]).run()

    found = full_run.record(build, folder)
    for name, content in found["files"].items():
        if name.endswith("args.json"):
            found["files"][name] = {key: value for key, value in content.items() if key not in OWN_ARGUMENTS}
        elif name.endswith("logging.jsonl"):  # with measured times
            found["files"][name] = "by name"
    return json.loads(json.dumps(found).replace(str(Path.cwd()), "."))


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "sft": partial(live, tuner_type="full"),
    "sft_lora": partial(live, tuner_type="lora", load_best_model_at_end="true"),
    "pretrain": partial(live, pipeline=SwiftPretrain, tuner_type="full"),
    "dpo": partial(live, pipeline=SwiftRLHF, row=compared, rlhf_type="dpo", tuner_type="lora"),
}
