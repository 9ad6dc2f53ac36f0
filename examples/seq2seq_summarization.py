"""Summarization: short reports by a small BART, scored by what it generates, with `Seq2SeqTrainer`.

    python examples/seq2seq_summarization.py

A report names three people, what each did and where, one of them with "importantly" before it; the summary is who did
what there: "importantly the mayor of oslo has opened a bridge" → "mayor opens bridge". The trained model writes more
than nine of ten summaries to the word after half a minute; naming one of the three would be right in 33%.
"""

import random

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BartConfig, BartForConditionalGeneration, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from hftrainer import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

WHO = ["mayor", "king", "doctor", "baker", "judge", "singer"]
DID = {"opened": "opens", "sold": "sells", "painted": "paints", "lost": "loses"}
WHAT = ["bridge", "house", "ship", "museum", "garden", "letter"]
WHERE = ["oslo", "lima", "rome", "paris"]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


def make_report(rng: random.Random) -> tuple[str, str]:
    sentences, important = [], rng.randrange(3)
    for i, (who, what) in enumerate(zip(rng.sample(WHO, 3), rng.sample(WHAT, 3), strict=True)):
        did = rng.choice(list(DID))
        mark = "importantly" if i == important else "also"
        sentences.append(f"{mark} the {who} of {rng.choice(WHERE)} has {did} a {what}")
        if i == important:
            summary = f"{who} {DID[did]} {what}"
    return " . ".join(sentences), summary


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token a word, and an end mark."""
    words = SPECIAL + sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", SPECIAL.index("</s>"))])
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def main() -> None:
    parser = HfArgumentParser(Seq2SeqTrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/seq2seq_summarization",
        num_train_epochs=5,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=100,
        learning_rate=3e-3,
        warmup_steps=50,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        predict_with_generate=True,
        generation_max_length=6,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    rng = random.Random(0)
    reports = [make_report(rng) for _ in range(2100)]
    tokenizer = make_tokenizer([text for pair in reports for text in pair])
    samples = [dict(tokenizer(report, text_target=summary)) for report, summary in reports]
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=40,
        init_std=0.1,  # small models learn sooner from larger weights
        dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=None,
    )

    def exact(prediction) -> dict[str, float]:
        """How many summaries are those that were wanted, to the word."""
        written, wanted = (
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        )
        return {"exact": float(np.mean([ours == theirs for ours, theirs in zip(written, wanted, strict=True)]))}

    model = BartForConditionalGeneration(config)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=samples[:2000],
        eval_dataset=samples[2000:],
        processing_class=tokenizer,
        compute_metrics=exact,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Summaries written to the word: {trainer.evaluate()['eval_exact']:.2f}")


if __name__ == "__main__":
    main()
