"""Fine-tune a BERT with Hugging Face's Trainer to 90 % sparsity: one callback.

Embeddings, pooler and classifier stay dense. The finished model is a normal directory that
`from_pretrained` loads, with the compact artifact in it.

    python examples/huggingface_bert.py [--quick]
"""

import itertools
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import probmask
from probmask.integrations.transformers import SparsityCallback

torch.set_num_threads(1)  # faster for matrices as small as these
QUICK = "--quick" in sys.argv
THINGS = ["film", "plot", "cast", "score", "script", "ending", "scene", "sound"]
GOOD = ["great", "superb", "moving", "lovely", "clever"]
BAD = ["dull", "weak", "silly", "noisy", "tedious"]


def reviews():
    """Return all sentences of a small grammar, and whether each praises or not."""
    sentences = [
        (f"the {one} was {word} and so was the {other}", int(word in GOOD))
        for one, other in itertools.permutations(THINGS, 2)
        for word in GOOD + BAD
    ]
    return [sentences[index] for index in torch.randperm(len(sentences))]


def tokenizer_of(texts):
    """Return a tokenizer with the words of these texts."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def accuracy(prediction):
    """Return the fraction of correct predictions."""
    correct = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": correct.mean().item()}


def main():
    """Train, evaluate, save and load."""
    torch.manual_seed(0)
    sentences = reviews()
    tokenizer = tokenizer_of([text for text, _ in sentences])
    data = [{**tokenizer(text), "labels": label} for text, label in sentences]
    # For a real model: AutoTokenizer.from_pretrained("bert-base-uncased") above, and here
    # model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=16,
        )
    )
    sparsity = SparsityCallback(probmask.TiedProbMask(sparsity=0.9), overwrite=True)
    trainer = Trainer(
        model,
        TrainingArguments(
            "sparse-bert",
            max_steps=6 if QUICK else 200,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data[:400],
        eval_dataset=data[400:],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[sparsity],  # the one line that makes the training sparse
    )
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}, {sparsity.summary.kept:,} weights")
    trainer.save_model()

    loaded = BertForSequenceClassification.from_pretrained("sparse-bert")
    zeros = sum(int((weight == 0).sum()) for weight in loaded.bert.encoder.parameters())
    print(f"the loaded model has {zeros:,} zeros in its encoder")
    for file in ("model.safetensors", "probmask.safetensors"):
        print(f"sparse-bert/{file}: {Path('sparse-bert', file).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
