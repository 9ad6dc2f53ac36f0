"""Lightning's callbacks: beside those of Hugging Face, in one list, and one of Lightning's profilers.

    python examples/lightning_callbacks.py

A network learns scikit-learn's handwritten digits. For two epochs its first layers are frozen; a moving average of
its weights is what is evaluated and saved; the times of the parts of a step are printed at the end; and Hugging
Face's early stopping watches. transformers has no such callbacks. Above 85% in ten seconds; guessing gives 10%.
"""

import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn

from hftrainer import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, set_seed


class Convolutions(nn.Module):
    """BackboneFinetuning freezes what is named `backbone`."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10))

    def forward(self, pixel_values, labels=None):
        logits = self.head(self.backbone(pixel_values))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class FrozenParts(TrainerCallback):
    """Hugging Face's kind sees the same model: how many parameters learn in an epoch."""

    def __init__(self) -> None:
        self.learning: list[int] = []

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        self.learning.append(sum(p.numel() for p in model.parameters() if p.requires_grad))


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/lightning_callbacks",
        num_train_epochs=6,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=40,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()
    args.lightning_config = {"profiler": "simple"}

    set_seed(args.seed)
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    samples = [{"pixel_values": image, "labels": int(n)} for image, n in zip(pixels, digits.target, strict=True)]
    frozen = FrozenParts()
    trainer = Trainer(
        model=Convolutions(),
        args=args,
        train_dataset=samples[:1400],
        eval_dataset=samples[1400:],
        compute_metrics=accuracy,
        loggers=[CSVLogger(args.output_dir, name="tables")],
        callbacks=[
            EarlyStoppingCallback(early_stopping_patience=3),
            frozen,
            BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False),
            EMAWeightAveraging(decay=0.95),
            LearningRateMonitor("step"),
        ],
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Parameters that learn, by epoch: {frozen.learning}")
    print(f"Accuracy of the averaged weights: {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
