"""The shape of run_audio_classification.py: a random cut of each sound as it is read, a feature extractor to save."""

from random import randint

import numpy as np
import parts
from sounds import RATE, SoundArguments, make_sounds, speech_sizes
from transformers import (
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForSequenceClassification,
)


def random_cut(sound, seconds):
    length = round(RATE * seconds)
    start = randint(0, max(len(sound) - length - 1, 0))
    return sound[start : start + length]


def compute_metrics(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


def main():
    _, data_args, training_args, checkpoint = parts.begin(parts.ModelArguments, SoundArguments, TrainingArguments)
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=False)
    name = extractor.model_input_names[0]

    def make_transform(cut):
        def transform(batch):
            sounds = [np.asarray(audio["array"]) for audio in batch["audio"]]
            sounds = [random_cut(sound, data_args.max_length_seconds) if cut else sound[:640] for sound in sounds]
            return {name: extractor(sounds, sampling_rate=RATE).get(name), "labels": list(batch["label"])}

        return transform

    data = make_sounds(data_args.train_samples)
    data["train"].set_transform(make_transform(cut=True), output_all_columns=False)
    data["eval"].set_transform(make_transform(cut=False), output_all_columns=False)
    labels = {str(number): f"speaker {number}" for number in range(3)}
    model = Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**speech_sizes(), num_labels=3, id2label=labels))
    model.freeze_feature_encoder()
    trainer = Trainer(
        model=model,
        args=training_args,
        **parts.splits(data),
        compute_metrics=compute_metrics,
        processing_class=extractor,
    )
    parts.finish(trainer, checkpoint, "audio-classification", tags=["audio-classification"])


if __name__ == "__main__":
    main()
