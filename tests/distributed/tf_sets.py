"""A TFTrainer in two processes, or in one with twice the batch: `tf_sets.py FOLDER PER_DEVICE`."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from hftrainer import TFTrainer, TFTrainingArguments
from tests.support.tensorflow import Still, rows

folder, per_device = Path(sys.argv[1]), int(sys.argv[2])
size = {"per_device_train_batch_size": per_device, "per_device_eval_batch_size": per_device}
steps = {"max_steps": 7, "gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 4}
args = TFTrainingArguments(str(folder), report_to="none", disable_tqdm=True, use_cpu=True, **size, **steps)


class Loud(TFTrainer):
    seen: list = []

    def log(self, logs):
        super().log(logs)
        self.seen.append(dict(logs))


trainer = Loud(Still(), args, train_dataset=rows(40), eval_dataset=rows(11))
trainer.train()
metrics = trainer.evaluate()
prediction = trainer.predict(rows(11))
if trainer._engine.is_world_process_zero():
    torch.save(trainer.model.state_dict(), folder / "weights.pt")
    np.save(folder / "predictions.npy", prediction.predictions)
    found = {"log": trainer.seen, "labels": prediction.label_ids.tolist(), "sizes": [args.n_replicas]}
    found["sizes"] += [args.train_batch_size, args.eval_batch_size, trainer.total_train_batch_size]
    (folder / "found.json").write_text(json.dumps(found))
