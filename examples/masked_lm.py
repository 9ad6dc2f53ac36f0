"""Masked language model: fill in the missing letters of words with a small BERT.

    python examples/masked_lm.py

The words are those of Python's manual, which comes with Python; a token is a letter. Always guessing "e" is right in
one case out of ten; the trained model is right in about four, after twenty seconds.
"""

import re
from pydoc_data.topics import topics

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=20, **SPECIAL)


def accuracy(prediction) -> dict[str, float]:
    """Of the letters that were hidden; -100 marks the others."""
    hidden = prediction.label_ids != -100
    return {"accuracy": (prediction.predictions[hidden] == prediction.label_ids[hidden]).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/masked_lm",
        num_train_epochs=12,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=256,
        learning_rate=3e-3,
        warmup_steps=50,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=100,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    tokenizer = make_tokenizer()
    words = sorted({word for text in topics.values() for word in re.findall(r"\b[a-z]{5,15}\b", text)})
    samples = [dict(tokenizer(word)) for word in words]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=20,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    trainer = Trainer(
        model=BertForMaskedLM(config),
        args=args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2),
        train_dataset=[sample for i, sample in enumerate(samples) if i % 10],
        eval_dataset=samples[::10],
        processing_class=tokenizer,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(
        f"Letters guessed in {len(samples[::10])} words not seen in training: {trainer.evaluate()['eval_accuracy']:.3f}"
    )


if __name__ == "__main__":
    main()
