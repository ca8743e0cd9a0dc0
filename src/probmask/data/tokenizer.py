"""Tokenizers: words, bytes, and files ``tokenizer.json`` of Hugging Face's package tokenizers.

A file is data: nothing in it is executed, and nothing is downloaded.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from probmask.data.settings import Sentences
from probmask.errors import InputError
from probmask.files import read_bounded
from probmask.messages import one_line

# The built-in tokenizers.
BUILT_IN = ("words", "bytes")
_FILE = "tokenizer.json"
_LARGEST_FILE = 2**28  # bytes; tokenizer.json of a vocabulary of 256,000 tokens has 2**25
_WORD = re.compile(r"\w+|[^\w\s]")
_PAD, _UNKNOWN = 0, 1  # of the built-in tokenizers
_PADDING_TOKENS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


@dataclass(frozen=True)
class Tokenizer:
    """Splits sentences into numbered tokens.

    Attributes:
        encode: Function of sentences and the largest number of tokens per sentence.
        size: Number of different tokens.
        pad: Number of the token that fills up shorter sentences.
        digest: SHA-256 of everything that determines the numbers of the tokens.
    """

    encode: Callable[[Sequence[str], int], list[list[int]]]
    size: int
    pad: int
    digest: str


def make_tokenizer(settings: Sentences, sentences: Sequence[str]) -> Tokenizer:
    """Return the tokenizer that the settings name; "words" counts the words of the sentences.

    Raises:
        InputError: The tokenizer does not exist or its file is damaged, the package tokenizers is
            missing, or the digest of the tokenizer is not the one in the settings.
    """
    if settings.tokenizer == "words":
        made = _words(sentences, settings.vocabulary)
    elif settings.tokenizer == "bytes":
        made = _bytes()
    else:
        made = _from_file(_find_file(settings.tokenizer))
    if settings.tokenizer_sha256 not in (None, made.digest):
        raise InputError(
            f"data_args(tokenizer={settings.tokenizer!r}): its SHA-256 is {made.digest[:12]}…, but "
            f"data_args.tokenizer_sha256 is {settings.tokenizer_sha256[:12]}…; restore the "
            "tokenizer (for 'words': the training sentences) with which the network was trained."
        )
    return made


def absolute_tokenizer(name: str) -> str:
    """Return the absolute path if the name is one of an existing file or directory."""
    path = Path(name)
    is_path = name not in BUILT_IN and not name.startswith("~") and path.exists()
    return str(path.absolute()) if is_path else name


def _words(sentences: Iterable[str], vocabulary: int) -> Tokenizer:
    counts = Counter(chain.from_iterable(_split(sentence) for sentence in sentences))
    ordered = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    numbers = {word: number for number, word in enumerate(ordered, start=2)}

    def encode(texts: Sequence[str], most: int) -> list[list[int]]:
        return [[numbers.get(word, _UNKNOWN) for word in _split(text)[:most]] for text in texts]

    digest = hashlib.sha256("\n".join(ordered).encode("utf-8", "surrogatepass")).hexdigest()
    return Tokenizer(encode, len(ordered) + 2, _PAD, digest)


def _split(sentence: str) -> list[str]:
    return _WORD.findall(sentence.lower())


def _bytes() -> Tokenizer:
    def encode(texts: Sequence[str], most: int) -> list[list[int]]:
        return [[byte + 1 for byte in text.encode()[:most]] for text in texts]

    return Tokenizer(encode, 257, _PAD, hashlib.sha256(b"bytes").hexdigest())


def _from_file(path: Path) -> Tokenizer:
    content = read_bounded(path, most=_LARGEST_FILE)
    library = _import_tokenizers(path)
    try:
        made: Any = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises plain exceptions
        raise InputError(
            f"{path}: is not a tokenizer of Hugging Face ({one_line(error)[:200]})."
        ) from error
    made.no_padding()
    pad = next((made.token_to_id(t) for t in _PADDING_TOKENS if made.token_to_id(t) is not None), 0)

    def encode(texts: Sequence[str], most: int) -> list[list[int]]:
        made.enable_truncation(most)
        try:
            return [encoding.ids for encoding in made.encode_batch_fast(list(texts))]
        except Exception as error:
            raise InputError(f"{path}: the tokenizer fails: {one_line(error)[:200]}.") from error

    size = 1 + max(made.get_vocab(with_added_tokens=True).values(), default=0)
    return Tokenizer(encode, size, pad, hashlib.sha256(content).hexdigest())


def _import_tokenizers(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            f"{path}: needs the package tokenizers; install it with pip install -c constraints.txt "
            "'probmask[text]', or use the built-in tokenizer 'words' or 'bytes'."
        ) from error
    return tokenizers


def _find_file(name: str) -> Path:
    """Return the tokenizer.json of a file, a directory or a model in Hugging Face's cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / _FILE).exists():
            raise InputError(
                f"data_args(tokenizer={name!r}): the directory has no {_FILE}. transformers writes "
                "it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
            )
        return path / _FILE
    if path.exists():
        return path
    return _cached_file(name)


def _cached_file(name: str) -> Path:
    """Return the tokenizer.json of a model in Hugging Face's cache, without any download."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        found = try_to_load_from_cache(name, _FILE)
    except (ImportError, HFValidationError):
        found = None
    if not isinstance(found, str):
        raise InputError(
            f"data_args(tokenizer={name!r}): is neither 'words' nor 'bytes', nor a file or "
            f"directory with a {_FILE}, nor a model in Hugging Face's cache (probmask downloads "
            f"none; 'hf download NAME {_FILE}' does)."
        )
    return Path(found)
