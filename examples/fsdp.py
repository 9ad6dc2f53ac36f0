"""FSDP: two processes that share a model's weights, gradients and optimizer, on CPUs as on GPUs.

    torchrun --nproc_per_node 2 examples/fsdp.py

A small Llama learns to count: 7 8 9 10, 31 32 33 34. Each process holds half of every layer and reads half of each
batch. After ten seconds the loss of the next number is below 0.1; guessing one of 100 would be 4.6. The checkpoints
are whole, and go on in any number of processes.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

NUMBERS, LENGTH = 100, 8


def make_samples(count: int) -> list[dict]:
    """Numbers that follow one another, from anywhere on; after 99 comes 0."""
    starts = torch.randint(NUMBERS, (count,)).tolist()
    counted = [[(start + i) % NUMBERS for i in range(LENGTH)] for start in starts]
    return [{"input_ids": numbers, "labels": numbers} for numbers in counted]


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/fsdp",
        max_steps=150,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        logging_steps=25,
        fsdp="full_shard auto_wrap",
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=NUMBERS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.1,  # small models learn sooner from larger weights
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=make_samples(2000),
        eval_dataset=make_samples(64),
    )
    trainer.train()
    trainer.save_model()  # the whole weights, gathered from all processes
    trainer.save_state()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"Loss in {args.world_size} processes: {loss:.3f}")


if __name__ == "__main__":
    main()
