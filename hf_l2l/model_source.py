"""A model by its name or folder: its config, and its shapes without any memory for its weights.

Nothing here loads weights. Errors are for those who typed the name: one sentence with the remedy.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

CONFIG, GGUF = "config.json", ".gguf"
_ADAPTER = "adapter_config.json"
"""In a folder that PEFT has written; there is no `CONFIG` then."""

_FAILS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    struct.error,
    TypeError,
    ValueError,
)
"""What code of transformers raises for a config that it cannot use."""

FLAGS = {"model": "MODEL", "model_class": "--class", "trust_remote_code": "--trust-remote-code"}
"""What a source, the class and the trust in code are called on the command line."""

_called: ContextVar[dict[str, str]] = ContextVar("called", default=FLAGS)


@contextmanager
def named_as_arguments() -> Iterator[None]:
    """Inside, errors name what the user gave as arguments of a function, and not as flags."""
    names = {"model": "model", "model_class": "model_class", "trust_remote_code": "trust_remote_code=True"}
    token = _called.set(names)
    try:
        yield
    finally:
        _called.reset(token)


def named(what: str) -> str:
    """What the user called one of `FLAGS`."""
    return _called.get()[what]


_SIZES = {
    "num_hidden_layers": re.compile("layer|depth|block|stage"),
    "hidden_size": re.compile("hidden|embd|embed|d_model|dim|width|channel"),
}
"""Fields without which a config would describe the default model of its type -> the names they have in some type."""


def load_config(source: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The config of a model (a `transformers.PreTrainedConfig`).

    Args:
        source: a folder with a config.json, the path of such a file or of one in GGUF, or a name
            on the Hub, which needs no connection where the file is in the Hub's cache.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ValueError: if there is no such model, the Hub cannot be reached, or the file is no config that transformers
            understands; one sentence, with the remedy.
    """
    given = os.fspath(source)
    file = _local_file(given)
    if file is None and (given.startswith((".", "/", "~")) or given.endswith(".json") or given.count("/") > 1):
        raise ValueError(
            f"{named('model')} must be a folder with a {CONFIG}, the path of one, or a name on the Hub (got "
            f"{given!r}, and there "
            "is no such file or folder); check the path"
        )
    packed = file is not None and file.suffix == GGUF
    stated = None if file is None or packed else _read(file)
    # A folder stands for itself: code that comes with a model lies there, too.
    place = given if file is None or file.parent == Path(given).expanduser() else str(file)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if file is not None and packed:
        place, options["gguf_file"] = str(file.parent), file.name
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(place, **options)
    except _FAILS as error:
        raise ValueError(_why_no_config(given, file, error)) from error
    if stated is not None:
        _refuse_defaults(file, stated, config)
    return config


def _local_file(given: str) -> Path | None:
    """The config file that a path leads to; None if nothing is there."""
    path = Path(given).expanduser()
    if path.is_dir() and not (path / CONFIG).is_file():
        _refuse_adapter(given, path / _ADAPTER)
        raise ValueError(
            f"the folder of a model must have a {CONFIG} (got {given!r}, which has none); give a folder that "
            "save_pretrained has written, or the path of the file"
        )
    return path / CONFIG if path.is_dir() else path if path.is_file() else None


def _refuse_adapter(given: str, file: Path) -> None:
    """Raise ValueError for the folder of an adapter of PEFT, which is no model by itself."""
    if not file.is_file():
        return
    base = _json_of(file).get("base_model_name_or_path")
    remedy = f"give that: {base}" if isinstance(base, str) and base else f"give it; {_ADAPTER} does not name it"
    raise ValueError(f"an adapter is a part of its base model (got {given!r}, a folder with {_ADAPTER}); {remedy}")


def _json_of(file: Path) -> dict[str, Any]:
    """The fields of a file; none if it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"a {CONFIG} must be a file of JSON (got {str(file)!r}: {told(error)}); write it with "
            "config.save_pretrained"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ValueError(
            f"a {CONFIG} must have the field model_type, by which transformers knows the model (got {str(file)!r} "
            "without it); add it, or write the file with config.save_pretrained"
        )
    return found


def _why_no_config(given: str, file: Path | None, error: Exception) -> str:
    text = told(error)
    if "trust_remote_code" in str(error):
        return (
            f"the model {given!r} comes with code of its own, which runs only if you trust it; look at the code, and "
            f"pass {named('trust_remote_code')}"
        )
    if file is not None:
        remedy = "correct the file, or install the transformers that knows its model_type"
        if isinstance(error, ImportError):
            remedy = "install it with: pip install gguf" if file.suffix == GGUF else "install what it names"
        return (
            f"transformers must be able to make a config of {str(file)!r} (got {type(error).__name__}: {text}); "
            f"{remedy}"
        )
    why = "HF_HUB_OFFLINE is set, and the cache has no such model" if _is_offline() else text
    return (
        f"{named('model')} must be a folder with a {CONFIG}, the path of one, or a name on the Hub that can be "
        f"reached or is in its cache (got {given!r}: {why}); download it where there is a connection, with: hf "
        f"download {given} {CONFIG}, or give a folder"
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _refuse_defaults(file: Path | None, stated: dict[str, Any], config: Any) -> None:
    """Raise ValueError for a file that does not say how large its model is: transformers would take the sizes of the
    type's default. Files of several models in one, which may lack what is the default of each, are not looked at."""
    if any(isinstance(value, dict) for value in stated.values()) or getattr(config, "sub_configs", None):
        return
    sizes = [name for name, value in stated.items() if _is_size(value)]
    missing = [n for n, pattern in _SIZES.items() if hasattr(config, n) and not any(map(pattern.search, sizes))]
    if missing:
        names = [config.attribute_map.get(name, name) for name in missing]
        raise ValueError(
            f"a {CONFIG} must say how large its model is (got {str(file)!r} of model_type "
            f"{stated['model_type']!r} without {' and '.join(names)}); add {'it' if len(names) == 1 else 'them'}"
        )


def _is_size(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def model_of(source: nn.Module | Any, *, model_class: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The model that a `source` stands for: itself, or on the meta device that of a config of transformers, or of what
    `load_config` takes.

    Raises:
        ValueError: as `load_shapes`; for a source of another kind; for a class named for a model that is made already.
    """
    from transformers import PreTrainedConfig

    if isinstance(source, nn.Module):
        if model_class is not None:
            raise ValueError(
                f"{named('model_class')} is for a model that is made of its config (got {model_class!r} and a "
                f"{type(source).__name__}); leave it out"
            )
        return source
    if isinstance(source, PreTrainedConfig):
        return shapes_of(source, model_class=model_class, trust_remote_code=trust_remote_code)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"{named('model')} must be a model, a config of transformers, a folder with a {CONFIG}, the path of "
            f"one, or a name on the Hub (got {source!r}); give one of them"
        )
    return load_shapes(source, model_class=model_class, trust_remote_code=trust_remote_code)


def load_shapes(
    source: str | os.PathLike[str],
    *,
    model_class: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The model of a config on the meta device: modules, shapes, ties and `model.config`, and no values.

    Args:
        source: as for `load_config`.
        model_class: the name of a class of transformers, such as "LlamaForCausalLM" or
            "AutoModelForSequenceClassification"; None for the architecture that the config names, or `AutoModel` if
            it names none that is known.
        trust_remote_code: whether code that comes with the model may run.
        dtype: of the parameters; float32 is that of the masters. A checkpoint may be in another one.

    Raises:
        ValueError: as `load_config`, or if there is no such class, or it makes no model of this config.
    """
    return shapes_of(
        load_config(source, trust_remote_code=trust_remote_code),
        model_class=model_class,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
    )


def shapes_of(
    config: Any,
    *,
    model_class: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The model of `config` on the meta device; arguments and errors as for `load_shapes`."""
    kind = class_for(config, model_class)
    before = torch.get_default_dtype()
    try:
        with torch.device("meta"):
            if hasattr(kind, "from_config"):
                model: nn.Module = kind.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype)
            else:
                model = kind._from_config(config, dtype=dtype)
    except _FAILS as error:
        raise ValueError(
            f"{kind.__name__} must be able to make a model of this config (got {type(error).__name__}: "
            f"{told(error)}); correct the fields that it names, or choose another class with {named('model_class')}"
        ) from error
    finally:
        torch.set_default_dtype(before)
    return model


def class_for(config: Any, model_class: str | None = None) -> Any:
    """The class of transformers that is called `model_class`; without a name, the first of `config.architectures` that
    transformers has, else `AutoModel`.

    Raises:
        ValueError: if there is no class of that name, or it makes no models.
    """
    import transformers

    if model_class is not None:
        kind = getattr(transformers, model_class, None)
        if not (hasattr(kind, "from_config") or hasattr(kind, "_from_config")) or not hasattr(kind, "from_pretrained"):
            raise ValueError(
                f"{named('model_class')} must be a class of models in transformers {transformers.__version__} (got "
                f"{model_class!r}); use one such as AutoModelForCausalLM or BertForSequenceClassification"
            )
        return kind
    known = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    return next((kind for kind in known if hasattr(kind, "_from_config")), transformers.AutoModel)


def told(error: BaseException, most: int = 200) -> str:
    """The first sentence of an error's text, in one line of at most that many characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = text.partition(". ")[0].rstrip(".")
    return sentence if len(sentence) <= most else sentence[: most - 3] + "..."
