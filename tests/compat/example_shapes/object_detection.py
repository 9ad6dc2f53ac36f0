"""The shape of run_object_detection.py: a list of boxes a picture as labels, batches kept apart for the metric."""

from functools import partial

import parts
import torch
from pictures import SIZE, PictureArguments, flipped_at_random, make_pictures, pixels, vision_sizes
from transformers import EvalPrediction, Trainer, TrainingArguments, YolosConfig, YolosForObjectDetection


def to_batch(change, rows):
    """Pictures with boxes as centre and size, relative to the picture."""
    labels = []
    for (row, column), label in zip(rows["place"], rows["label"], strict=True):
        box = torch.tensor([[column + 2.5, row + 2.5, 5.0, 5.0]]) / SIZE
        size = torch.tensor([SIZE, SIZE])
        labels.append({"class_labels": torch.tensor([label]), "boxes": box, "orig_size": size})
    return {"pixel_values": [change(image) for image in rows["image"]], "labels": labels}


def collate(examples):
    stacked = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": stacked, "labels": [example["labels"] for example in examples]}


@torch.no_grad()
def compute_metrics(results: EvalPrediction, threshold=0.0):
    hits, distances = [], []
    for targets, batch in zip(results.label_ids, results.predictions, strict=True):
        logits, boxes = torch.tensor(batch[1]), torch.tensor(batch[2])
        best = logits.softmax(-1)[..., :-1].amax(-1)
        for place, target in enumerate(targets):
            query = int(best[place].argmax())
            right = torch.tensor(target["boxes"])[0] * torch.tensor(target["orig_size"]).repeat(2)
            hits.append(float(logits[place, query, :-1].argmax() == int(target["class_labels"][0])))
            distances.append(float((boxes[place, query] * SIZE - right).abs().sum()))
    kept = [distance for distance in distances if distance >= threshold]
    return {"map": round(sum(hits) / len(hits), 4), "distance": sum(kept) / len(kept)}


def main():
    data_args, model_args, training_args, checkpoint = parts.begin(
        PictureArguments, parts.ModelArguments, TrainingArguments
    )
    data = make_pictures(data_args.train_samples, data_args.train_val_split)
    config = YolosConfig(
        **vision_sizes(image_size=[SIZE, SIZE], hidden_size=model_args.hidden_size),
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
        compute_metrics=partial(compute_metrics, threshold=0.0),
    )
    parts.train(trainer, checkpoint)
    if training_args.do_eval:
        validation = data["validation"].with_transform(partial(to_batch, pixels))
        parts.report(
            trainer, "test", trainer.evaluate(eval_dataset=validation, metric_key_prefix="test"), len(validation)
        )
    parts.describe(trainer, "object-detection", tags=["object-detection", "vision"])


if __name__ == "__main__":
    main()
