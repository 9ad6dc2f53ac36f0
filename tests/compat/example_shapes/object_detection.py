"""The shape of run_object_detection.py: a model of many outputs, and for each picture a dict of tensors as labels."""

from functools import partial

import parts
import torch
from pictures import SIZE, SQUARE, flipped_at_random, make_pictures, pixels, vision_sizes
from transformers import EvalPrediction, Trainer, YolosConfig, YolosForObjectDetection


def to_batch(change, rows):
    labels = []
    for (row, column), label in zip(rows["place"], rows["label"], strict=True):
        box = torch.tensor([[column + SQUARE / 2, row + SQUARE / 2, SQUARE, SQUARE]]) / SIZE
        labels.append({"class_labels": torch.tensor([label]), "boxes": box})
    return {"pixel_values": [change(image) for image in rows["image"]], "labels": labels}


def collate(examples):
    stacked = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": stacked, "labels": [example["labels"] for example in examples]}


def compute_metrics(results: EvalPrediction):
    """Of the query that is surest in each picture; the batches are apart, since there may be any number of boxes."""
    hits, distances = [], []
    for targets, (_, logits, boxes, _) in zip(results.label_ids, results.predictions, strict=True):
        for target, scores, found in zip(targets, logits, boxes, strict=True):
            query = scores[:, :-1].max(axis=1).argmax()
            hits.append(scores[query, :-1].argmax() == target["class_labels"][0])
            distances.append(abs(found[query] - target["boxes"][0]).sum())
    return {"map": float(sum(hits)) / len(hits), "distance": float(sum(distances))}


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    data = make_pictures(data_args)
    config = YolosConfig(
        **{**vision_sizes(), "image_size": [SIZE, SIZE], "hidden_size": model_args.hidden_size},
        num_detection_tokens=5,
        num_labels=4,
        use_mid_position_embeddings=False,
    )
    trainer = Trainer(
        model=YolosForObjectDetection(config),
        args=training_args,
        train_dataset=data["train"].with_transform(partial(to_batch, flipped_at_random)),
        eval_dataset=data["validation"].with_transform(partial(to_batch, pixels)),
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
    parts.train(trainer, checkpoint)
    test = data["test"].with_transform(partial(to_batch, pixels))
    parts.report(trainer, "test", trainer.evaluate(eval_dataset=test, metric_key_prefix="test"), len(test))
    parts.describe(trainer, "object-detection", tags=["object-detection", "vision"])
