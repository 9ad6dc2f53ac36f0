"""Several tasks at once: a model that returns a dict of losses, each of which is in the log.

    python examples/multi_task.py

Each handwritten digit of scikit-learn is read, called odd or even, and its ink is measured. The losses are added up
for training, and each is in the log. transformers takes one loss only. In fifteen seconds, nine of ten digits are
read, and the ink is told to a few hundredths; guessing reads one of ten.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import ViTConfig, ViTModel

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed


class ThreeTasks(nn.Module):
    """A vision transformer with three heads."""

    def __init__(self) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            initializer_range=0.1,  # small models learn sooner from larger weights
        )
        self.body = ViTModel(config, add_pooling_layer=False)
        self.heads = nn.ModuleDict({name: nn.Linear(48, size) for name, size in SIZES.items()})

    def forward(self, pixel_values, digit=None, parity=None, ink=None) -> dict:
        seen = self.body(pixel_values).last_hidden_state[:, 0]
        outputs = {f"{name}_output": head(seen) for name, head in self.heads.items()}
        if digit is not None:
            outputs["loss"] = {
                "digit_loss": cross_entropy(outputs["digit_output"], digit),
                "parity_loss": 0.5 * cross_entropy(outputs["parity_output"], parity),
                "ink_loss": mse_loss(outputs["ink_output"][:, 0], ink),
            }
        return outputs


SIZES = {"digit": 10, "parity": 2, "ink": 1}


def metrics(prediction) -> dict[str, float]:
    """Predictions and labels come in the order of the outputs and of `label_names`."""
    (digits, parities, inks), (true_digits, true_parities, true_inks) = prediction.predictions, prediction.label_ids
    return {
        "digit_accuracy": (digits.argmax(-1) == true_digits).mean(),
        "parity_accuracy": (parities.argmax(-1) == true_parities).mean(),
        "ink_error": float(abs(inks[:, 0] - true_inks).mean()),
    }


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/multi_task",
        num_train_epochs=10,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        label_names=list(SIZES),
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=40,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    samples = [
        {"pixel_values": image, "digit": int(n), "parity": int(n) % 2, "ink": float(image.mean())}
        for image, n in zip(pixels, digits.target, strict=True)
    ]
    trainer = Trainer(
        model=ThreeTasks(),
        args=args,
        train_dataset=samples[:1400],
        eval_dataset=samples[1400:],
        compute_metrics=metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    for name, value in trainer.evaluate().items():
        if name.endswith(("_loss", "_accuracy", "_error")):
            print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
