"""`L2LConfig` takes what is within the rule of each field, and refuses the rest where it is made."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_l2l import L2LConfig
from hf_l2l.config import _CHOICES, check_ubatch_size
from hf_l2l.runtime.tensors import size_text

NO_UBATCH_SIZES = st.one_of(
    st.integers(max_value=0),
    st.booleans(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers()),
    st.complex_numbers(),
)


def test_defaults():
    config = L2LConfig()
    assert (config.ubatch_size, config.stash, config.device, config.layer_classes) == (None, "device", None, None)


def test_it_is_a_value():
    assert L2LConfig(ubatch_size=2) == L2LConfig(ubatch_size=2)
    assert L2LConfig(ubatch_size=2) != L2LConfig(ubatch_size=3)
    assert hash(L2LConfig(layer_classes=("Block",))) == hash(L2LConfig(layer_classes=("Block",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        L2LConfig().ubatch_size = 3
    with pytest.raises(TypeError):
        L2LConfig(4)  # by name only


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("ubatchsize", "did you mean ubatch_size?"),
        ("l2l_trace", "did you mean trace?"),
        ("l2l_stash", "did you mean stash?"),
        ("zzz", "help(L2LConfig) lists them"),
    ],
)
def test_an_option_that_does_not_exist_is_told_with_the_nearest(name, end):
    with pytest.raises(TypeError) as error:
        L2LConfig(**{name: 1, "stash": "host"})
    assert str(error.value) == f"an option of L2LConfig must be one that it has (got {name}); {end}"
    with pytest.raises(TypeError, match=re.escape(end)):
        dataclasses.replace(L2LConfig(), **{name: 1})


def test_the_signature_has_the_options():
    assert list(inspect.signature(L2LConfig).parameters) == [field.name for field in dataclasses.fields(L2LConfig)]


@given(st.integers(min_value=1))
def test_any_positive_whole_number_is_a_ubatch_size(size):
    assert L2LConfig(ubatch_size=size).ubatch_size == size
    check_ubatch_size(size)


@given(NO_UBATCH_SIZES)
def test_anything_else_is_no_ubatch_size(value):
    with pytest.raises(ValueError, match="ubatch_size must be a whole number of at least 1"):
        L2LConfig(ubatch_size=value)
    with pytest.raises(ValueError, match="ubatch_size"):
        check_ubatch_size(value)


@pytest.mark.parametrize("value", [0, -3, True, 1.5, "4", [2]])
def test_the_ubatch_size_message_has_rule_value_and_remedy(value):
    with pytest.raises(ValueError) as error:
        L2LConfig(ubatch_size=value)
    assert str(error.value) == (
        "ubatch_size must be a whole number of at least 1, or None for the whole device batch "
        f"(got {value!r}); set it to the rows that fit through one layer at once"
    )


@pytest.mark.parametrize("stash", ["device", "host", "disk", "auto"])
def test_places_of_the_stash(stash):
    assert L2LConfig(stash=stash).stash == stash


@pytest.mark.parametrize("value", ["ssd", "", "HOST", None, 1])
def test_the_stash_message_has_rule_value_and_remedy(value):
    with pytest.raises(ValueError) as error:
        L2LConfig(stash=value)
    assert str(error.value) == (
        f"stash must be one of 'device', 'host', 'disk', 'auto' (got {value!r}); "
        "use 'auto' when the layer inputs do not fit the device"
    )


def test_the_layer_classes_message_has_rule_value_and_remedy():
    message = "layer_classes must be a tuple or list of class names (got the string 'Block'); write ('Block',)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        L2LConfig(layer_classes="Block")
    assert L2LConfig(layer_classes=("Block", "Other")).layer_classes == ("Block", "Other")


@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("cpu")])
def test_names_of_devices(device):
    assert L2LConfig(device=device).device == device


@pytest.mark.parametrize("value", ["cude", "cuda:x", 2.5])
def test_the_device_message_has_rule_value_and_remedy(value):
    with pytest.raises(ValueError) as error:
        L2LConfig(device=value)
    assert str(error.value).startswith(f"device must name a torch device (got {value!r}: ")
    assert str(error.value).endswith("); write 'cuda', or leave it out for the current accelerator")


def test_replacing_a_field_checks_it_again():
    with pytest.raises(ValueError, match=r"\(got 0\)"):
        dataclasses.replace(L2LConfig(), ubatch_size=0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (5 * 2**38, "1280.0 GiB"),
    ],
)
def test_bytes_as_people_read_them(num_bytes, text):
    assert size_text(num_bytes) == text


@pytest.mark.parametrize("value", ["late", None, True, "Deferred"])
def test_when_to_update_is_one_of_four(value):
    with pytest.raises(ValueError, match="eps_update must be one of 'auto', 'serial', 'deferred', 'eager'"):
        L2LConfig(eps_update=value)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_threads_are_a_positive_whole_number(value):
    with pytest.raises(ValueError, match="num_threads must be a whole number of at least 1, or None"):
        L2LConfig(num_threads=value)
    assert L2LConfig(num_threads=1).num_threads == 1


def test_there_are_no_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert L2LConfig(num_threads=4).num_threads == 4
    with pytest.raises(ValueError) as error:
        L2LConfig(num_threads=1_000_000)
    assert str(error.value) == (
        "num_threads must be at most the 4 cores of this machine (got 1000000); leave it out for all cores but one"
    )


@pytest.mark.parametrize("value", [1.0, 2.0, True, "2", 3, None])
def test_gradient_slots_are_one_or_two(value):
    with pytest.raises(ValueError, match=rf"gradient_slots must be 1 or 2 \(got {value!r}\); use 1 where"):
        L2LConfig(gradient_slots=value)


@pytest.mark.parametrize("value", [5, (), [], ("Block", 5), [None], {"Block"}, True])
def test_layer_classes_are_words(value):
    message = (
        f"layer_classes must be a tuple or list of class names (got {value!r}); write ('MyBlock',), or leave it out to"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        L2LConfig(layer_classes=value)


def test_a_list_of_layer_classes_is_the_tuple():
    assert L2LConfig(layer_classes=["Block"]) == L2LConfig(layer_classes=("Block",))


WORDS = sorted({word for known, _ in _CHOICES.values() for word in get_args(known)})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.complex_numbers(),
    st.sampled_from(["cpu", "cuda:1", "Block", "yes", "4", "a\0b", "\ud800", "x" * 300, *WORDS]),
    st.text(st.characters(exclude_characters="/"), max_size=5),  # and no path that another test looks at
    st.binary(max_size=3),
)
ANYTHING = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.lists(SCALARS, max_size=2).map(tuple),
    st.dictionaries(st.text(max_size=2), SCALARS, max_size=1),
    st.builds(torch.ones, st.integers(0, 2)),
    st.builds(object),
)
FIELDS = [field.name for field in dataclasses.fields(L2LConfig)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FIELDS)
@given(value=ANYTHING)
def test_any_value_makes_a_config_or_is_refused(name, value):
    try:
        config = L2LConfig(**{name: value})
    except ValueError as error:
        assert re.search(rf"\b{name}\b", str(error)), str(error)
    else:
        assert config == L2LConfig(**{name: value})
        assert isinstance(hash(config), int)
