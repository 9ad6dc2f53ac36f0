"""Without transformers: the digits with a plain `nn.Module`; torch, lightning and hftrainer are enough.

The images come from scikit-learn if it is installed (`pip install scikit-learn`), else patterns of the same size are
drawn with noise.

    python examples/plain_torch.py
"""

import argparse

import torch
from torch import nn

from hftrainer import Trainer, TrainingArguments, set_seed


def make_samples() -> list[dict]:
    """Images of shape (1, 8, 8) with their labels."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        patterns = torch.randn(10, 8, 8)
        targets = torch.randint(0, 10, (1797,))
        images = patterns[targets] + 0.5 * torch.randn(1797, 8, 8)
    else:
        digits = load_digits()
        targets = torch.tensor(digits.target)
        images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
    order = torch.randperm(len(images)).tolist()
    return [{"pixels": images[i][None], "labels": int(targets[i])} for i in order]


class Convolutions(nn.Module):
    """All that the Trainer asks of a model: keywords named as the samples' keys, and the loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None):
        logits = self.layers(pixels)
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits, labels), logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", default="plain_torch_output", help="where to write (default %(default)s)")
    parser.add_argument("--epochs", type=float, default=5, help="passes over the data (default %(default)s)")
    options = parser.parse_args()

    set_seed(0)
    samples = make_samples()
    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=20,
        use_cpu=True,
    )
    trainer = Trainer(
        model=Convolutions(),
        args=args,
        train_dataset=samples[:1257],
        eval_dataset=samples[1257:1527],
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
    )
    trainer.train()
    metrics = trainer.predict(samples[1527:]).metrics
    print(f"Test accuracy: {metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    main()
