"""The families that are checked, as data: for each, the classes of its config and model, the sizes of a tiny model,
and the maker of its batches. A file has one kind of family; sizes that many share stand at its top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_l2l.verify.families.decoders import DECODERS, MIXTURES
from hf_l2l.verify.families.hybrids import HYBRIDS
from hf_l2l.verify.families.multimodal import MULTIMODAL
from hf_l2l.verify.families.seq2seq import ENCODER_DECODERS
from hf_l2l.verify.families.sound import AUDIO, SERIES
from hf_l2l.verify.families.text_encoders import TEXT_ENCODERS
from hf_l2l.verify.families.vision import VISION
from hf_l2l.verify.family import Family

Groups = Mapping[str, Sequence[Family]]
GROUPS: Groups = {
    "Text encoders": TEXT_ENCODERS,
    "Decoders": DECODERS,
    "Mixtures of experts": MIXTURES,
    "State-space models and hybrids": HYBRIDS,
    "Encoder-decoders": ENCODER_DECODERS,
    "Images and video": VISION,
    "Sound": AUDIO,
    "Time series": SERIES,
    "Several modalities": MULTIMODAL,
}
"""All families, by kind."""
