"""Sentences from tab-separated files: columns, parts, tokenizers, batches, and wrong files."""

import json
import sys

import pytest
import torch

from data.sentence_files import WORDS, rows, write
from probmask.data import Shard, load_data
from probmask.errors import InputError


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.tsv", rows(100))
    write(tmp_path / "dev.tsv", rows(20, seed=1))
    write(tmp_path / "test.tsv", rows(30, seed=2))
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer.json, as transformers saves it, with special tokens."""
    library = pytest.importorskip("tokenizers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocabulary |= {word: 4 + index for index, word in enumerate(WORDS[:10])}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_padding(length=64)  # as saved with a model; batches must not be padded to it
    (tmp_path / "tokenizer").mkdir()
    made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return tmp_path / "tokenizer"


def test_the_parts_and_their_labels(folder):
    data = load_data("tsv", folder)
    assert (data.train_size, data.val_size, data.test_size) == (100, 0, 30)
    assert (data.classes, data.class_names, data.image_shape) == (2, ("0", "1"), None)
    assert data.train_labels.tolist() == [int(label) for _, label in rows(100)]
    held = data.with_validation()
    assert (held.train_size, held.val_size, held.test_size) == (100, 20, 30)
    (batch,) = held.validation(batch_size=20)
    assert sorted(batch.labels.tolist()) == sorted(int(label) for _, label in rows(20, seed=1))


def test_a_lone_validation_file_and_a_lone_file_are_split(tmp_path, folder):
    (folder / "test.tsv").unlink()
    data = load_data("tsv", folder).with_validation()
    assert (data.train_size, data.val_size, data.test_size) == (90, 10, 20)
    one = load_data("tsv", folder / "train.tsv")
    assert (one.train_size, one.test_size) == (80, 20)


@pytest.mark.parametrize(
    ("header", "settings"),
    [
        ("sentence\tlabel", {}),
        ("Text\tLabel", {}),
        ("review\tclass", {"text": "review", "label": "class"}),
        ("review\tclass", {"text": 1, "label": 2, "header": True}),
        (None, {"text": 1, "label": 2}),
    ],
)
def test_columns_by_name_and_by_number(tmp_path, header, settings):
    data = load_data("tsv", write(tmp_path / "a.tsv", rows(50), header), settings)
    assert data.train_size + data.test_size == 50
    assert data.class_names == ("0", "1")


def test_labels_of_any_kind_are_classes_in_a_fixed_order(tmp_path):
    pairs = [("one", "10"), ("two", "9"), ("three", "9"), ("four", "10"), ("five", "9")]
    path = write(tmp_path / "a.tsv", pairs * 2)
    assert load_data("tsv", path).class_names == ("9", "10")
    text = write(tmp_path / "b.tsv", [(s, {"9": "neg", "10": "pos"}[y]) for s, y in pairs * 2])
    assert load_data("tsv", text).class_names == ("neg", "pos")


def test_a_batch_is_padded_to_its_longest_sentence_and_the_padding_is_masked(folder, tokenizer):
    data = load_data("tsv", folder, {"tokenizer": str(tokenizer), "max_length": 8})
    seen = []
    for batch in data.training(0, batch_size=10, seed=0):
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        lengths = mask.sum(1)
        assert ids.shape == mask.shape == (10, int(lengths.max()))
        assert int(lengths.max()) <= 8
        for row, length in zip(ids, lengths, strict=True):
            assert row[0] == 2  # [CLS]
            assert row[length - 1] == 3  # [SEP], also of a sentence that was cut
            assert (row[length:] == 0).all()
        seen += [(len(row), int(y)) for row, y in zip(ids, batch.labels, strict=True)]
    assert len(seen) == 100
    assert data.vocabulary == 14


def test_words_and_bytes_need_no_package(folder):
    words = load_data("tsv", folder, {"vocabulary": 6})
    (batch,) = words.testing(batch_size=30)
    assert words.vocabulary == 6
    assert int(batch.inputs["input_ids"].max()) == 5
    assert (batch.inputs["input_ids"] == 1).any()  # words that are not in the vocabulary
    data = load_data("tsv", folder, {"tokenizer": "bytes", "max_length": 1000})
    (batch,) = data.testing(batch_size=30)
    row = batch.inputs["input_ids"][-1]  # the longest is last
    text = bytes((row[row > 0] - 1).tolist()).decode()
    assert text in [sentence for sentence, _ in rows(30, seed=2)]


def test_batches_are_a_function_of_seed_epoch_and_position(folder):
    data = load_data("tsv", folder)

    def batches(epoch=0, seed=0, **others):
        return [
            (batch.inputs["input_ids"], batch.labels)
            for batch in data.training(epoch, batch_size=12, seed=seed, **others)
        ]

    whole = batches()
    assert len(whole) == data.steps_per_epoch(12) == 8
    for one, other in zip(whole[5:], batches(start=5), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    for other in (batches(epoch=1), batches(seed=1)):
        assert any(a[0].shape != b[0].shape for a, b in zip(whole, other, strict=True))
    halves = [batches(shard=Shard(rank, 2)) for rank in (0, 1)]
    for position, (_, labels) in enumerate(whole):
        both = torch.cat([half[position][1] for half in halves])
        assert sorted(both.tolist()) == sorted(labels.tolist())


def test_batches_contain_sentences_of_similar_length(folder):
    """Every sentence is used once per epoch, and the batches are not sorted by length."""
    data = load_data("tsv", folder)
    masks = [b.inputs["attention_mask"] for b in data.training(0, batch_size=10, seed=0)]
    lengths = torch.cat([mask.sum(1) for mask in masks])
    expected = [len(sentence.split()) for sentence, _ in rows(100)]
    assert sorted(lengths.tolist()) == sorted(expected)
    padding = 1 - torch.cat([mask.flatten() for mask in masks]).double().mean()
    assert padding < 0.1
    widths = [mask.shape[1] for mask in masks]
    assert widths != sorted(widths)


def test_another_tokenizer_than_the_recorded_one_is_refused(folder, tokenizer):
    data = load_data("tsv", folder, {"tokenizer": str(tokenizer)})
    recorded = {"tokenizer": str(tokenizer), "tokenizer_sha256": data.settings.tokenizer_sha256}
    assert load_data("tsv", folder, recorded).fingerprint() == data.fingerprint()
    path = tokenizer / "tokenizer.json"
    table = json.loads(path.read_text())
    table["model"]["vocab"]["good"] = 99
    path.write_text(json.dumps(table))
    assert load_data("tsv", folder, {"tokenizer": str(path)}).fingerprint() != data.fingerprint()
    with pytest.raises(InputError, match="restore the tokenizer"):
        load_data("tsv", folder, recorded)


@pytest.mark.parametrize(
    ("content", "settings", "expected"),
    [
        ("", {}, "contains no sentences"),
        ("sentence\tlabel\n", {}, "contains no sentences"),
        ("a\t0\nb\t1\tx\n", {}, "line 2 has 3 columns, but line 1 has 2; separate"),
        ("a\t0\n\t1\n", {}, "line 2 has no sentence"),
        ("a\t0\nb\t \n", {}, "line 2 has no label"),
        ("a\t0\nb\t0\n", {}, "all labels are '0'; expected several classes"),
        ("a\t0.1\nb\t0.2\nc\t0.3\n", {"header": False}, "no label occurs twice"),
        ("review\tgrade\na\t0\nb\t1\n", {}, "first line seems to name the columns"),
        ("sentence,label\na,0\n", {}, "has one column; separate sentence and label by a tab"),
        ("a,0\nb,1\n", {"text": "sentence"}, "has one column; separate"),
        ("a\tb\t0\nc\td\t1\n", {}, "3 columns, and which of them is the text is not clear"),
        ("a\tb\t0\nc\td\t1\n", {"text": 1, "label": 1}, "both in column 1"),
        ("a\t0\nb\t1\n", {"label": 3}, "label=3.*has 2 columns"),
        ("sentence\tlabel\na\t0\n", {"label": "labels"}, "no such column; did you mean 'label'"),
        ("a\t0\nb\t1\n", {"label": "x", "header": False}, "as numbers, from 1 on"),
        ("a\t0\nb\t1\n", {"label": 0}, "label=0.*a column, from 1 on"),
        ("a\t0\nb\t1\n", {"max_length": 1}, "max_length=1"),
        ("a\t0\nb\t1\n" * 5, {"tokenizer": "wrods"}, "is neither 'words' nor 'bytes', nor a file"),
        (b"a\t0\n\xff\t1\n", {}, "line 2 is not UTF-8 text"),
    ],
)
def test_a_wrong_file_raises_one_clear_message(tmp_path, content, settings, expected):
    path = tmp_path / "a.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=expected) as caught:
        load_data("tsv", path, settings)
    assert "\n" not in str(caught.value)


def test_wrong_directories_raise(tmp_path, folder):
    with pytest.raises(InputError, match="needs sentences"):
        load_data("tsv")
    with pytest.raises(InputError, match="does not exist"):
        load_data("tsv", tmp_path / "nothing")
    write(folder / "val.tsv", rows(5))
    with pytest.raises(InputError, match=r"contains dev.tsv and val.tsv; keep one"):
        load_data("tsv", folder)
    (folder / "val.tsv").unlink()
    write(folder / "test.tsv", [("fine", "2"), ("good", "1")])
    with pytest.raises(InputError, match=r"test.tsv: has the label '2', which no training sent"):
        load_data("tsv", folder)
    (folder / "train.tsv").unlink()
    with pytest.raises(InputError, match=r"contains no train.tsv"):
        load_data("tsv", folder)


def test_damaged_tokenizers_raise(tmp_path, folder, tokenizer, monkeypatch):
    def load(name):
        return load_data("tsv", folder, {"tokenizer": str(name)})

    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"the directory has no tokenizer.json"):
        load(tmp_path / "empty")
    (tmp_path / "damaged.json").write_text("{}")
    with pytest.raises(InputError, match="is not a tokenizer of Hugging Face"):
        load(tmp_path / "damaged.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install -c constraints.txt 'probmask\[text\]'"):
        load(tokenizer)
