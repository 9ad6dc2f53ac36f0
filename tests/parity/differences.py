"""The ledger: where hftrainer and transformers differ on purpose, each with its reason.

Parity tests read it; `COMPATIBILITY.md` says the same to users.
"""

#: Keys of log lines that are measured times: equal in name, never in value.
MEASURED = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")

#: What must differ → why.
DIFFERENCES = {
    "README.md of a PEFT adapter": (
        "PEFT writes the library versions that it finds into it; both libraries let PEFT write it, so it is compared "
        "by name only."
    ),
    "training_args.bin": "Pickles the TrainingArguments class, which is another one; compared by name only.",
    "metrics returned by train() with disable_tqdm": (
        "PrinterCallback of transformers removes total_flos from the very dict that train() returns; ours prints a "
        "copy."
    ),
    "compute_loss without num_items_in_batch": (
        "transformers 5.23 calls every override with num_items_in_batch and fails on those of v4.45 and before; ours "
        "calls each by its own signature, and divides its loss by the micro-batches of the window."
    ),
    "compute_loss without return_outputs": (
        "Overrides of v4.1 give evaluation their loss; the predictions come from a forward pass of their own."
    ),
    "architectures saved under other names": (
        "transformers 5.23 saves some (ViT) in the names of older releases and its Trainer loads them by name, so "
        "neither a resumed run nor load_best_model_at_end gets the weights; ours loads them by from_pretrained."
    ),
    "tied weights of a plain module": "transformers cannot save them; ours writes the shared tensor once.",
    "an empty evaluation set": "transformers returns metrics without a loss; ours says that there is no batch.",
    "an empty training stream": "accelerate raises in the middle of an epoch; ours stops with a warning.",
    "predict() outside training": (
        "It runs Lightning's prediction loop, whose callbacks see predict hooks; numbers and events are the same."
    ),
}
