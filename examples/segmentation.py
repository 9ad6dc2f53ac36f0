"""Segmentation: find discs and rings in noisy pictures, pixel by pixel, with a small SegFormer.

    python examples/segmentation.py

The pictures of 32x32 pixels are drawn on the spot. Calling everything background gives a mean IoU of about 0.25; the
trained model gets above 0.8 in half a minute. Its masks are a quarter of the picture's size, and are scaled up.
"""

import numpy as np
import torch
from torch.nn.functional import interpolate
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

KINDS = ["background", "disc", "ring"]
SIZE = 32


def draw(rng: np.random.Generator) -> dict:
    """A picture of shape (3, 32, 32) with one disc and one ring, and the kind of each pixel, (32, 32)."""
    picture = rng.normal(0, 0.3, (3, SIZE, SIZE))
    labels = np.zeros((SIZE, SIZE), dtype=np.int64)
    y, x = np.mgrid[:SIZE, :SIZE]
    for kind in rng.permutation([1, 2]):
        (row, column), radius = rng.integers(6, SIZE - 6, 2), rng.integers(5, 10)
        distance = np.hypot(y - row, x - column)
        inside = (distance < radius) & (distance > radius - 3 if kind == 2 else True)
        picture[:, inside] += rng.choice([-1, 1], (3, 1))
        labels[inside] = kind
    return {"pixel_values": torch.tensor(picture, dtype=torch.float32), "labels": torch.tensor(labels)}


def classes_of_pixels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Shape (batch, 32, 32): what compute_metrics gets instead of the logits."""
    return interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False).argmax(1)


def mean_iou(prediction) -> dict[str, float]:
    """Pixels that are of a kind in both masks, of those that are in either; the mean of the kinds."""
    guessed, true = prediction.predictions, prediction.label_ids
    kinds = range(len(KINDS))
    each = [((guessed == i) & (true == i)).sum() / max(((guessed == i) | (true == i)).sum(), 1) for i in kinds]
    return {"mean_iou": float(np.mean(each))}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/segmentation",
        num_train_epochs=6,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=50,
        learning_rate=3e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=25,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    rng = np.random.default_rng(0)
    samples = [draw(rng) for _ in range(900)]
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[32, 64],
        num_attention_heads=[2, 4],
        patch_sizes=[5, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=64,
        initializer_range=0.1,  # small models learn sooner from larger weights
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        id2label=dict(enumerate(KINDS)),
        label2id={kind: i for i, kind in enumerate(KINDS)},
    )
    trainer = Trainer(
        model=SegformerForSemanticSegmentation(config),
        args=args,
        train_dataset=samples[:800],
        eval_dataset=samples[800:],
        compute_metrics=mean_iou,
        preprocess_logits_for_metrics=classes_of_pixels,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Mean IoU on pictures not seen in training: {trainer.evaluate()['eval_mean_iou']:.3f}")


if __name__ == "__main__":
    main()
