"""Killed and resumed: a run that goes on as if nothing had happened.

    python examples/killed_and_resumed.py

Starts a training in a process of its own, kills it with `kill -9` in the middle, wherever that hits, and starts it
again: it goes on from the newest whole checkpoint. Then the same training runs without the fault, and the weights of
both are compared, bit by bit. The digits of scikit-learn are read right in about three of four cases, instead of one
of ten.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, get_last_checkpoint, set_seed


@dataclass
class Options:
    train: bool = False  # what the processes that are started do


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def train(args: TrainingArguments) -> None:
    """As any training script: it goes on if there is a checkpoint."""
    set_seed(args.seed)
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    samples = [{"pixel_values": image, "labels": int(n)} for image, n in zip(pixels, digits.target, strict=True)]
    shape = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(**shape, hidden_size=48, intermediate_size=96, num_labels=10, hidden_dropout_prob=0.1)
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=args,
        train_dataset=samples[:1400],
        eval_dataset=samples[1400:],
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    trainer.save_model()
    trainer.save_state()
    print(f"Accuracy: {trainer.evaluate()['eval_accuracy']:.3f}")


def start(folder: Path) -> subprocess.Popen:
    """This script again, as a process that trains into `folder`."""
    return subprocess.Popen([sys.executable, __file__, "--train", *sys.argv[1:], "--output_dir", str(folder)])


def main() -> None:
    parser = HfArgumentParser((Options, TrainingArguments))
    parser.set_defaults(
        output_dir="demo_output/killed_and_resumed",
        num_train_epochs=6,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        save_steps=20,
        save_total_limit=3,
        logging_steps=40,
        use_cpu=True,
    )
    options, args = parser.parse_args_into_dataclasses()
    if options.train:
        return train(args)

    killed, undisturbed = (Path(args.output_dir) / name for name in ("killed", "undisturbed"))
    process = start(killed)
    while process.poll() is None and not list(killed.glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.05)
    process.kill()
    if process.wait() == 0:
        print("It had ended before it could be killed.")
    print(f"\nKilled; there is {get_last_checkpoint(str(killed))}. Going on:")
    assert start(killed).wait() == 0
    print("\nWithout the fault:")
    assert start(undisturbed).wait() == 0

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (killed, undisturbed))
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"\nThe weights of both are {'the same, to the last bit' if same else 'different'}.")
    return None


if __name__ == "__main__":
    main()
