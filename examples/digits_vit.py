"""Image classification: fine-tune a small vision transformer on real handwritten digits; `make demo`.

The 1,797 images of 8x8 pixels ship with scikit-learn. An ordinary Trainer script but for one import.
"""

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils.logging import disable_progress_bar

from hftrainer import Trainer, TrainingArguments, set_seed


class Noisy(Dataset):
    """Images with a little noise, anew each time they are read."""

    def __init__(self, samples: list[dict]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        sample = self.samples[index]
        pixels = sample["pixel_values"]
        return {**sample, "pixel_values": pixels + 0.2 * torch.randn_like(pixels)}


def make_datasets(seed: int = 0) -> tuple[Dataset, list[dict], list[dict]]:
    """Training, validation and test images of shape (1, 8, 8), with their labels."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    samples = [
        {"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, digits.target, strict=True)
    ]
    train, rest = train_test_split(samples, test_size=0.3, random_state=seed, stratify=digits.target)
    validation, test = train_test_split(rest, test_size=0.5, random_state=seed)
    return Noisy(train), validation, test


def make_model() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    return ViTForImageClassification(config)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", default="demo_output", help="where to write (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=25, help="passes over the data (default %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    options = parser.parse_args()

    disable_progress_bar()  # of saving; the training bar is the Trainer's
    set_seed(0)
    train, validation, test = make_datasets()
    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.05,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        use_cpu=True,
    )
    trainer = Trainer(
        model=make_model(),
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=accuracy,
    )
    start = time.time()
    trainer.train(resume_from_checkpoint=options.resume)
    metrics = trainer.predict(test).metrics
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("test", metrics)

    print(f"\nTrained {trainer.get_num_trainable_parameters():,} parameters in {time.time() - start:.0f} s.")
    print(f"Best checkpoint:  {trainer.state.best_model_checkpoint} (validation {trainer.state.best_metric:.4f})")
    print(f"Test accuracy:    {metrics['test_accuracy']:.4f} on {len(test)} images never seen in training")
    print(f"\nWritten to {options.output_dir}/:")
    for name in sorted(os.listdir(options.output_dir)):
        print(f"  {name}{'/' if os.path.isdir(os.path.join(options.output_dir, name)) else ''}")
    print("\nInterrupt it, and go on with:  python examples/digits_vit.py --resume")
    print(
        "Your own script: change `from transformers import Trainer, TrainingArguments` to `from hftrainer import ...`."
    )


if __name__ == "__main__":
    main()
