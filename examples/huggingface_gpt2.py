"""Train a GPT-2 with Hugging Face's Trainer to 80 % sparsity, and generate text with it.

GPT-2 computes with `Conv1D` layers instead of `nn.Linear`; they are masked too. The embeddings stay
dense, and so does the output layer, which shares its weight with them.

    python examples/huggingface_gpt2.py [--quick]
"""

import argparse
import inspect
import math
import sys

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import probmask
from probmask.integrations.transformers import SparsityCallback

torch.set_num_threads(1)  # faster for matrices as small as these
QUICK = "--quick" in sys.argv
STEPS, LENGTH = (6, 16) if QUICK else (150, 32)
TEXT = inspect.getsource(argparse)  # 90 kB that every Python installation has


def trained_tokenizer():
    """Return a tokenizer made from the text."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [TEXT], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def main():
    """Train, evaluate and generate."""
    torch.manual_seed(0)
    tokenizer = trained_tokenizer()
    codes = tokenizer(TEXT, return_tensors="pt")["input_ids"][0]
    rows = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)
    data = [{"input_ids": row, "labels": row} for row in rows]
    split = int(0.9 * len(data))
    end = tokenizer.eos_token_id
    # For a real model: AutoTokenizer.from_pretrained("gpt2") above, and here
    # model = AutoModelForCausalLM.from_pretrained("gpt2")
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=64,
            n_layer=2,
            n_head=2,
            n_positions=LENGTH,
            bos_token_id=end,
            eos_token_id=end,
        )
    )
    sparsity = SparsityCallback(probmask.TiedProbMask(sparsity=0.8), overwrite=True)
    trainer = Trainer(
        model,
        TrainingArguments(
            "sparse-gpt2",
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data[:split],
        eval_dataset=data[split:],
        callbacks=[sparsity],  # the one line that makes the training sparse
    )
    trainer.train()
    print(sparsity.summary)
    perplexity = math.exp(trainer.evaluate()["eval_loss"])
    print(f"perplexity per token on unseen text: {perplexity:.1f} of {len(tokenizer)}")

    prompt = tokenizer("    def add_", return_tensors="pt")
    written = model.generate(**prompt, max_length=LENGTH, do_sample=False, pad_token_id=end)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
