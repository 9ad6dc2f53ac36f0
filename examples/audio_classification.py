"""Audio classification: tell instruments apart by the shape of their wave, with a small Wav2Vec2.

    python examples/audio_classification.py

A quarter of a second of a sine, square, sawtooth or triangle wave of any pitch, with noise, is made on the spot.
Guessing is right in 25% of the cases; the trained model in nine of ten, after twenty seconds.
"""

import numpy as np
from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

WAVES = ["sine", "square", "sawtooth", "triangle"]
RATE = 4000  # samples a second


def play(wave: str, rng: np.random.Generator) -> np.ndarray:
    """Shape (1000,): a quarter of a second, from a random phase on."""
    phase = (rng.uniform(100, 400) * np.arange(RATE // 4) / RATE + rng.random()) % 1
    sound = {
        "sine": np.sin(2 * np.pi * phase),
        "square": np.sign(phase - 0.5),
        "sawtooth": 2 * phase - 1,
        "triangle": 4 * abs(phase - 0.5) - 1,
    }[wave]
    return rng.uniform(0.3, 1) * sound + rng.normal(0, 0.05, len(sound))


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/audio_classification",
        num_train_epochs=8,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=100,
        learning_rate=1e-3,
        warmup_steps=30,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    rng = np.random.default_rng(0)
    # Makes the volume the same for all.
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    labels = rng.integers(len(WAVES), size=1000)
    sounds = extractor([play(WAVES[label], rng) for label in labels], sampling_rate=RATE)["input_values"]
    samples = [{"input_values": sound, "labels": int(label)} for sound, label in zip(sounds, labels, strict=True)]
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(32, 32, 32),
        conv_kernel=(10, 4, 4),
        conv_stride=(4, 4, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=32,
        mask_time_prob=0.0,
        layerdrop=0.0,
        id2label=dict(enumerate(WAVES)),
        label2id={wave: i for i, wave in enumerate(WAVES)},
    )
    trainer = Trainer(
        model=Wav2Vec2ForSequenceClassification(config),
        args=args,
        train_dataset=samples[:800],
        eval_dataset=samples[800:],
        processing_class=extractor,
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Accuracy on sounds not heard in training: {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
