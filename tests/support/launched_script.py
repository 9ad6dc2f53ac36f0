"""A script that knows nothing of launchers: trains a few steps, saves, and writes down what each process found."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from hftrainer import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from tests.support.small_models import MODELS


class Misbehaving(TrainerCallback):
    """Fails in the process that the environment names."""

    def on_step_end(self, args, state, control, **kwargs):
        if os.environ.get("MISBEHAVE") == f"fail {args.process_index}" and state.global_step == 2:
            raise RuntimeError("as asked")


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    folder = Path(args.output_dir)
    torch.set_num_threads(1)
    before = [args.world_size, args.process_index, args.local_process_index]
    order = []
    for local in (True, False):
        with args.main_process_first(local=local):
            order.append(sorted(path.name for path in folder.glob(f"first-{local}-*")))
            (folder / f"first-{local}-{args.process_index}").touch()
    make_model, make_data = MODELS[os.environ.get("MODEL", "plain")]
    trainer = Trainer(make_model(), args, train_dataset=make_data(), callbacks=[Misbehaving])
    if os.environ.get("MISBEHAVE") == "wait":
        sys.stdout.write(f"waiting {os.getpid()}\n")  # in one piece: two processes share the pipe
        sys.stdout.flush()
        threading.Event().wait()  # until it is ended
    trainer.train()
    trainer.save_model(str(folder / "final"))
    found = {
        "place": before,
        "still": [args.world_size, args.process_index, args.local_process_index],
        "order": order,
        "step": trainer.state.global_step,
        "weights": [value.tolist() for value in trainer.accelerator.get_state_dict(trainer.model).values()],
        "kind": trainer.accelerator.distributed_type.value,
        "environment": type(trainer.lightning_trainer.strategy.cluster_environment).__name__,
        "compiled": trainer.model._compiled_call_impl is not None,
        "local_rank": args.local_rank,
        "arguments": sys.argv[1:3],
    }
    (folder / f"{args.process_index}.json").write_text(json.dumps(found))
    if os.environ.get("MISBEHAVE") == "fail late" and args.process_index == 1:
        while not (folder / "0.json").exists():  # then the first has all but ended
            time.sleep(0.01)
        sys.exit(3)


if __name__ == "__main__":
    main()
