"""The shape of run_semantic_segmentation.py: logits of a quarter of the size, enlarged for the metric."""

import numpy as np
import parts
import torch
from pictures import SIZE, PictureArguments, flipped_at_random, make_pictures, mask_of, pixels
from transformers import (
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

LABELS = ["background", "square"]


@torch.no_grad()
def compute_metrics(prediction):
    logits, labels = prediction
    large = torch.nn.functional.interpolate(torch.from_numpy(logits), size=labels.shape[-2:], mode="bilinear")
    found = large.argmax(dim=1).numpy()
    metrics = {}
    for number, name in enumerate(LABELS):
        both, either = (found == number) & (labels == number), (found == number) | (labels == number)
        metrics[f"iou_{name}"] = float(both.sum() / max(either.sum(), 1))
    return metrics | {"mean_iou": float(np.mean(list(metrics.values())))}


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, PictureArguments, TrainingArguments)
    data = make_pictures(data_args.train_samples, data_args.train_val_split)

    def preprocess(change):
        return lambda rows: {
            "pixel_values": [change(image) for image in rows["image"]],
            "labels": [mask_of(place) for place in rows["place"]],
        }

    data["train"].set_transform(preprocess(flipped_at_random))
    data["validation"].set_transform(preprocess(pixels))
    config = SegformerConfig(
        image_size=SIZE,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        id2label=dict(enumerate(LABELS)),
        label2id={name: number for number, name in enumerate(LABELS)},
    )
    trainer = Trainer(
        model=SegformerForSemanticSegmentation(config),
        args=training_args,
        **parts.splits(data),
        compute_metrics=compute_metrics,
        data_collator=default_data_collator,
    )
    parts.finish(trainer, checkpoint, "image-segmentation", tags=["image-segmentation", "vision"])


if __name__ == "__main__":
    main()
