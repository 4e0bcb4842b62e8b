"""What a pretrained model needs for a data set: a head for its classes with their names, and a token to pad with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_l2l.glue.data import Data
from hf_l2l.glue.messages import first_line, logger
from hf_l2l.glue.own_data.labels import label_key


@contextmanager
def said_as(option: str, name: str) -> Iterator[None]:
    """Say what could not be loaded, and which option named it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--{option} must be a folder or a name on the Hub, with a model and its tokenizer (got {name}: "
            f"{first_line(error)}); check the name, the path, or the connection"
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights of the model must fit a head for these labels (got others in {name}, reported above); add "
            "--ignore_mismatched_sizes to give it a new head"
        ) from error


def name_classes(config: PretrainedConfig, names: list[str] | None) -> None:
    """Give the classes their names in the order of their ids; an order that the model comes with is kept."""
    config.problem_type = "regression" if names is None else "single_label_classification"
    if names is None:
        return
    own = [name.lower() for name in config.label2id]
    if len(set(own)) < len(own) or sorted(own) != sorted(name.lower() for name in names):
        config.id2label = dict(enumerate(names))
        config.label2id = {name: index for index, name in config.id2label.items()}


def class_ids(config: PretrainedConfig, data: Data) -> dict[str, int]:
    """The id that the model gives to each label of the rows, by `label_key`; none for a regression."""
    ids = {name.lower(): index for name, index in config.label2id.items()} | config.label2id
    labels = zip(data.classes or [], data.names or [], strict=True)
    return {label_key(label): ids.get(name, ids.get(name.lower())) for label, name in labels}


def set_padding(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make sure that texts of different length can stand in one batch: decoders often have no token for it."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer must have a token to pad with (got {name!r}, which has none, nor an end of sequence); "
                "choose another one with --tokenizer_name"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: %r is used", tokenizer.eos_token)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
